"""What a task is: a maker of problems whose ids are enough to make them again, with held-out problems apart by their text.

A problem id is ``kind/name?params#index``, for example ``reasoning_gym/chain_sum?max_digits=2&min_terms=2#183746``.
Parameters are sorted, their values are JSON, and those equal to the library's default are left out, so one problem has one
id. Which split a problem belongs to is a function of its prompt text alone: the same text can never be in both, however
small the task's space and whoever draws it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import quote, unquote

from coterie.errors import CoterieError, UserError
from coterie.types import Problem

Split = Literal["train", "eval"]
EVAL_BELOW = 6554
"""Held out: prompts whose 16-bit hash is below this (a tenth of 65,536). `tiny` was trained with the same rule."""
_READABLE = '[]{},:.*/+-"'  # left as they are in an id's parameter values
MAX_TRIES = 1000
"""Indices tried for one problem of the wanted split before the task's space is called too small."""


class UnknownProblem(CoterieError):
    """A problem id that this process cannot turn into a problem."""


class Task(Protocol):
    """A named source of problems."""

    name: str  # the key in the config; metrics are reported under it

    @property
    def prefix(self) -> str:
        """The id of its problems up to the ``#``."""

    def problem(self, index: int) -> Problem:
        """The problem at ``index``. Raises UnknownProblem if there is none."""

    def sample(self, split: Split, stream: str, counter: int) -> Problem:
        """A problem of ``split``: a pure function of the arguments (``stream`` is, for example, the node's identity)."""


@dataclass(frozen=True, slots=True)
class ProblemId:
    """A parsed problem id."""

    kind: str
    name: str
    params: tuple[tuple[str, str], ...]  # (key, canonical JSON), sorted
    index: int

    @property
    def prefix(self) -> str:
        return id_prefix(self.kind, self.name, {k: json.loads(v) for k, v in self.params})


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; tuples as lists. Raises TypeError for what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def id_prefix(kind: str, name: str, params: Mapping[str, Any]) -> str:
    text = "&".join(f"{k}={quote(canonical_json(v), safe=_READABLE)}" for k, v in sorted(params.items()))
    return f"{kind}/{name}" + (f"?{text}" if text else "")


@functools.lru_cache(maxsize=256)  # asked for every answer; few, since a peer's id may be long
def parse_id(text: str) -> ProblemId:
    """Take a problem id apart.

    Raises:
        UnknownProblem: not of the form ``kind/name?params#index``, or not in canonical form.
    """
    head, sep, tail = text.rpartition("#")
    path, _, query = head.partition("?")
    kind, slash, name = path.partition("/")
    if not (sep and slash and kind and name and tail.isascii() and tail.isdigit() and len(tail) <= 19):
        raise UnknownProblem(f"problem id {text[:200]!r} is not of the form kind/name?params#index")
    params = {}
    try:
        for pair in query.split("&") if query else []:
            key, _, value = pair.partition("=")
            params[key] = json.loads(unquote(value))
        parsed = ProblemId(kind, name, tuple((k, canonical_json(v)) for k, v in sorted(params.items())), int(tail))
    except (ValueError, RecursionError) as e:
        raise UnknownProblem(f"problem id {text[:200]!r}: parameters are not JSON") from e
    if f"{parsed.prefix}#{parsed.index}" != text:
        raise UnknownProblem(f"problem id {text[:200]!r} is not canonical (expected {parsed.prefix}#{parsed.index})")
    return parsed


def split_of_text(text: str) -> Split:
    """The split of a prompt text (without any suffix): held out iff its hash falls in the first tenth."""
    head = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:2], "big")
    return "eval" if head < EVAL_BELOW else "train"


def hashed(*key: str | int) -> int:
    """A 64-bit number that depends on every part of ``key``."""
    return int.from_bytes(hashlib.sha256(canonical_json(key).encode()).digest()[:8], "big")


def too_small(name: str, split: Split, tries: int) -> UserError:
    return UserError(
        f"task {name}: no {split} problem in {tries} draws; its space of problems is too small to hold some out. "
        f"Widen its parameters (`coterie tasks show {name}` lists them)"
    )
