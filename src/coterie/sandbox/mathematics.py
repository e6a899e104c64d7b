"""The ``math`` verifier: math-verify, reference first, with guards for its known false positives.

- Both sides are numbers by :func:`coterie.tasks.verifiers.parse_number`: its exact rule decides alone. That settles small
  numbers and percent signs (28% is 0.28 and never 28).
- Both sides have a numerical value and math-verify calls them equal: they must also agree to a relative 1e-9
  (1/2004! is not 1/2006!).
- Texts are read as LaTeX formulas, so an equation is compared as an equation and not by its right-hand side alone.
- Several values where one is asked for ("7 or 8") are wrong.
"""

from __future__ import annotations

import re
from typing import Any

from coterie.tasks.verifiers import BadReference, normalise, parse_number, same_number

_REL_TOL = 1e-9
_HEDGE = re.compile(r"\bor\b|\\text\s*\{\s*or\s*\}|\bmaybe\b|\beither\b", re.IGNORECASE)


def same(reference: str, answer: str) -> float:
    """1 if ``answer`` is mathematically the reference, else 0.

    Raises:
        BadReference: math-verify cannot read the reference.
    """
    gold, value = parse_number(reference), parse_number(answer)
    if gold is not None and value is not None:
        return float(same_number(value, gold, tolerant="." in reference))
    if _HEDGE.search(answer) and not _HEDGE.search(reference):
        return 0.0
    return _verify(reference, answer)


def _verify(reference: str, answer: str) -> float:
    from math_verify import verify

    gold = _parse(reference)
    if not gold:
        raise BadReference(f"reference {reference[:80]!r} is not a formula")
    found = _parse(answer)
    if not found or not verify(gold, found, timeout_seconds=0):  # time is limited from outside, by killing
        return 0.0
    return float(_close(gold[0], found[0]))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    clean = re.sub(r"(\d(?:[\d.]*\d)?)\s*\\?%", r"\\frac{\1}{100}", normalise(text))
    out: list[Any] = parse(f"${clean}$", parsing_timeout=0)
    return out


def _close(gold: Any, found: Any) -> bool:
    """False only if both have a numerical value and the values differ."""
    from sympy import Basic

    for side in (gold, found):
        if not (isinstance(side, Basic) and getattr(side, "is_number", False)):
            return True
    a, b = gold.evalf(30), found.evalf(30)
    if not (a.is_finite and b.is_finite):
        return True
    return bool(abs(a - b) <= _REL_TOL * abs(a))
