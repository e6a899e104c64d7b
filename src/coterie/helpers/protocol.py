"""What is asked of a helper, what comes back, and how a question is found in the policy's words.

A request has no field for the reference answer, and is built from a problem's *prompt*, never from the problem: what a
helper cannot be handed, it cannot leak (tests/security/test_helpers_canary.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HelperRequest:
    """One question. ``shown`` is the end of the trajectory so far (policy and helper words, no prompt)."""

    role: str
    question: str  # the problem's prompt
    query: str
    shown: str
    max_tokens: int
    seed: int  # for helpers that sample in this process


@dataclass(frozen=True, slots=True)
class HelperReply:
    """A helper's words.

    ``token_ids`` is set only if the helper has the policy's tokenizer; ``logprobs`` (same length) only if they are those
    of the distribution the ids were sampled from. ``span_logprob``: that of the whole text, known to helpers with any
    tokenizer. ``cut``: the helper hit its own token limit.
    """

    text: str
    helper: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    span_logprob: float | None = None
    cut: bool = False
    latency_s: float = 0.0
    offered_logprobs: bool = False  # the helper returned log-probs, whether or not they can be aligned


@dataclass(frozen=True, slots=True)
class HelperFailure:
    """No usable reply: an infrastructure state, not an answer. ``kind`` is a short word for counting."""

    kind: str  # timeout | connection | http | malformed | too_large | empty | breaker | script | too_long
    detail: str
    helper: str
    latency_s: float = 0.0


Outcome = HelperReply | HelperFailure


class HelperError(Exception):
    """Raised by a backend for one try; the pool turns it into a :class:`HelperFailure` (or tries again)."""

    def __init__(self, kind: str, detail: str, *, retry: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.retry, self.retry_after_s = kind, detail, retry, retry_after_s


class RemoteHelper(Protocol):
    """A helper that is waited for while rows decode. ``respond`` raises HelperError."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str: ...

    async def respond(self, request: HelperRequest) -> HelperReply: ...


class InProcessHelper(Protocol):
    """A helper that computes here, asked in batches between decoding rounds. Never raises for a bad question."""

    @property
    def name(self) -> str: ...

    def respond_batch(self, requests: Sequence[HelperRequest]) -> list[Outcome]: ...


@dataclass(frozen=True, slots=True)
class Tags:
    """Start and end tag of one role's questions. Roles may share an end tag; start tags are distinct."""

    role: str
    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Query:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class InvalidQuery:
    role: str  # the role that the end tag belongs to; empty if several share it
    reason: str


def parse_query(text: str, stop: str, tags: Sequence[Tags]) -> Query | InvalidQuery:
    """The question that the end tag ``stop`` closes in ``text``, the policy's words since the last insertion.

    Only words since then are read, so tags inside earlier replies never count. The last start tag before the end tag
    opens the question, whatever stood open before it.
    """
    closed_by = [t for t in tags if t.end == stop]
    guess = closed_by[0].role if len(closed_by) == 1 else ""
    before = text[: text.find(stop)] if stop in text else text
    position, opened = max(((before.rfind(t.start), t) for t in tags), key=lambda found: found[0])
    if position < 0:
        return InvalidQuery(guess, "no start tag")
    if opened.end != stop:
        return InvalidQuery(guess, f"{opened.start} closed by {stop}")
    query = before[position + len(opened.start) :].strip()
    return Query(opened.role, query) if query else InvalidQuery(opened.role, "empty question")


_ANSWERED = re.compile(r"<answer>.*?</answer>|\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", re.DOTALL)


def answered(text: str) -> bool:
    """Whether a complete final answer stands in ``text``: a question after it is not served."""
    return _ANSWERED.search(text) is not None


def tag_strings(tags: Iterable[Tags]) -> list[str]:
    return [s for t in tags for s in (t.start, t.end)]
