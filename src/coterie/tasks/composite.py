"""Names of verifiers, alone or as a weighted sum written ``0.9*numeric+0.1*format``.

In Python and in a JSONL line a sum is a mapping, ``{"numeric": 0.9, "format": 0.1}``. If one part abstains, the sum
abstains: a missing part cannot be told from a lost one.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from typing import Any

from coterie.errors import UserError

MAX_WEIGHT = 1000.0  # of one verifier in a sum: what is larger can only be a mistake, or meant to overflow
VERIFIERS = ("exact", "numeric", "math", "code", "task", "task_partial", "format")


def verifier_name(value: Any, where: str) -> str:
    """A verifier as written by a user (name or mapping name -> weight) as one name."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value and all(_is_weight(w) for w in value.values()):
        return "+".join(f"{float(w)!r}*{name}" for name, w in sorted(value.items()))
    raise UserError(f"{where}: `verifier` must be a name or a mapping of names to positive weights")


@functools.lru_cache(maxsize=64)  # asked twice for every answer
def parts(verifier: str) -> tuple[tuple[str, float], ...]:
    """``((name, weight), ...)`` of a verifier name. Raises UserError if it is not one."""
    out = []
    for part in verifier.split("+"):
        weight, star, name = part.partition("*")
        try:
            out.append((name.strip(), float(weight)) if star else (part.strip(), 1.0))
        except ValueError as e:
            raise UserError(f"verifier {verifier!r}: {weight!r} is not a weight") from e
    if not all(_is_weight(w) for _, w in out):
        raise UserError(f"verifier {verifier!r}: weights must be above 0 and at most {MAX_WEIGHT:g}")
    return tuple(out)


def check_verifier(verifier: str, where: str, custom: Collection[str] = ()) -> None:
    """Raises UserError (with a suggestion) unless every part is known."""
    known = [*VERIFIERS, *custom]
    for name, _ in parts(verifier):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"{where}: unknown verifier {name!r}; {hint}")


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_WEIGHT
