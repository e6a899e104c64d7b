"""Helped rollouts: the policy writes, asks, reads the reply, and goes on, all on token ids.

Invariants (tests/invariants/test_helpers_dialogue.py): a trajectory only ever grows; what the engine is sent at each turn
is the trajectory so far, id for id; nothing that was sampled is decoded and encoded again; every token has one source and
one log-prob.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from coterie.helpers.protocol import (
    HelperFailure,
    HelperReply,
    HelperRequest,
    InvalidQuery,
    Outcome,
    Query,
    answered,
    parse_query,
)
from coterie.helpers.roles import HelperSet
from coterie.rng import derive
from coterie.types import Consult, Sample, Sampling, Segment, Source, StopReason, Trajectory

if TYPE_CHECKING:
    from coterie.engines.base import Engine

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class DialogueStart:
    """``n`` trajectories that begin with the same prompt. Only the problem's text comes in here, never its answer."""

    question: str  # the problem's prompt, as helpers see it
    prompt_ids: Sequence[int]  # from HelperSet.prompt_ids
    seed: int
    n: int = 1


@dataclass
class _Dialogue:
    """One trajectory in the making."""

    place: tuple[int, int]  # (start, sample)
    question: str
    seed: int
    helpers: HelperSet
    ids: list[int]
    prompt_length: int
    source: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    consults: list[Consult] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    turn: int = 0
    notes: int = 0
    ended: StopReason | None = None
    failed: str | None = None

    def __post_init__(self) -> None:
        self.source = [int(Source.CONTEXT)] * self.prompt_length
        self.logprobs = [NAN] * self.prompt_length

    @property
    def room(self) -> int:
        """Response tokens left."""
        return self.helpers.budget.response - (len(self.ids) - self.prompt_length)

    def take(self, sample: Sample) -> HelperRequest | None:
        """Append what the engine sampled. Returns the question to ask, or None: ended, or go on decoding."""
        self.turn += 1
        count = min(len(sample.token_ids), self.room)  # the engine's budget is that of the row with the most room
        ids = [int(i) for i in sample.token_ids[:count]]
        text = self.helpers.encoder.decode(ids)
        self._append(ids, Source.POLICY, [float(p) for p in sample.logprobs[:count]], text)
        if count < len(sample.token_ids):
            self.ended = StopReason.LENGTH
        elif sample.stop_reason is not StopReason.STOP or sample.stop_string not in self.helpers.end_tags:
            self.ended = sample.stop_reason
        elif answered("".join(s.text for s in self.segments if s.source is Source.POLICY)):
            self.ended = StopReason.STOP
        else:
            return self._question(text, sample.stop_string)
        return None

    def _question(self, text: str, stop: str) -> HelperRequest | None:
        found = parse_query(text, stop, self.helpers.tags)
        budget = self.helpers.budget
        if isinstance(found, Query) and len(self.helpers.encoder.encode(found.text)) > budget.query:
            found = InvalidQuery(found.role, f"question longer than {budget.query} tokens")
        if isinstance(found, InvalidQuery):
            self._note("invalid", found.role, found.reason)
            return None
        if not budget.allows(found.role, self.used, self.room):
            self._note("limit", found.role, found.text)
            return None
        self.used[found.role] = self.used.get(found.role, 0) + 1
        shown = self.ids[max(self.prompt_length, len(self.ids) - self.helpers.cfg.shown_tokens) :]
        seed = derive(self.seed, "helper", self.place[1], self.turn)
        return HelperRequest(
            found.role,
            self.question,
            found.text,
            self.helpers.encoder.decode(shown),
            self.helpers.max_tokens(found.role),
            seed,
        )

    def answer(self, request: HelperRequest, outcome: Outcome) -> None:
        """Insert a reply, or the note that there is none."""
        if isinstance(outcome, HelperReply):
            self.helpers.offered_logprobs[request.role] = outcome.offered_logprobs
            body = self.helpers.body(request.role, outcome)
            if body.token_ids:
                self._wrapper("open")
                start = len(self.ids)
                self._append(body.token_ids, Source.HELPER, body.logprobs, body.text)
                self._consult(request.role, outcome.helper, request.query, "ok", start, outcome.latency_s)
                self._wrapper("close_cut" if body.cut or outcome.cut else "close")
                return
            outcome = HelperFailure("empty", "nothing left of the reply", outcome.helper, outcome.latency_s)
        self.failed = self.failed or f"helper {request.role}: {outcome.kind}: {outcome.detail}"
        start = len(self.ids)
        self._context("unavailable")
        self._consult(request.role, outcome.helper, request.query, "failed", start, outcome.latency_s)

    def _note(self, kind: str, role: str, query: str) -> None:
        """Tell the policy that its question was not served; end the rollout if it was told often enough."""
        start = len(self.ids)
        if self.notes >= self.helpers.budget.notes:
            self.ended = StopReason.STOP
        elif len(self.helpers.ids[kind]) >= self.room:
            self.ended = StopReason.LENGTH
        else:
            self.notes += 1
            self._context(kind)
        self._consult(role, "", query, kind, start, 0.0)

    def _consult(self, role: str, helper: str, query: str, outcome: str, start: int, latency_s: float) -> None:
        self.consults.append(Consult(role, helper, query, outcome, start, len(self.ids), latency_s))

    def _context(self, name: str) -> None:
        ids = self.helpers.ids[name]
        self._append(ids, Source.CONTEXT, [NAN] * len(ids), self.helpers.texts[name])

    def _wrapper(self, name: str) -> None:
        if not self.helpers.cfg.train_wrappers:
            self._context(name)
            return
        ids = self.helpers.ids[name]  # always the same: probability 1
        self._append(ids, Source.HELPER, [0.0] * len(ids), self.helpers.texts[name])

    def _append(self, ids: Sequence[int], source: Source, logprobs: Sequence[float], text: str) -> None:
        assert len(ids) == len(logprobs)
        self.ids += ids
        self.source += [int(source)] * len(ids)
        self.logprobs += logprobs
        self.segments.append(Segment(source, text))

    def trajectory(self, temperature: float) -> Trajectory:
        assert self.ended is not None
        return Trajectory(
            token_ids=np.array(self.ids, np.int32),
            source=np.array(self.source, np.uint8),
            behavior_logprobs=np.array(self.logprobs, np.float32),
            prompt_length=self.prompt_length,
            segments=tuple(self.segments),
            stop_reason=self.ended,
            temperature=temperature,
            failed=self.failed,
            mode="helped",
            consults=tuple(self.consults),
        )


def run_dialogues(
    engine: Engine,
    starts: Sequence[DialogueStart],
    helpers: HelperSet,
    sampling: Sampling,
    meanwhile: Iterable[tuple[int, int, Trajectory]] = (),
) -> Iterator[tuple[int, int, Trajectory]]:
    """Yield ``(start index, sample index, trajectory)`` as trajectories end; rewards are not set.

    Rows that wait for a remote helper do not hold up the others. Helpers of this process are asked in batches between
    decoding rounds. Given the same replies, the result does not depend on how long they took.

    Args:
        sampling: ``max_new_tokens`` is the budget of a whole response, and the one the helpers' budget was made with;
            its own stop strings end a rollout.
        meanwhile: other rows that the same engine decodes; taken, and passed on, after the first turn, while the helpers
            that are waited for answer its questions.

    Log-probs: of the policy for its own tokens; of the helper for its tokens where they are known, else NaN; NaN for
    prompt, wrappers and notes. A failed consultation marks the trajectory as failed: neither right nor wrong.
    """
    assert sampling.max_new_tokens == helpers.budget.response
    loop = _Loop(engine, helpers, sampling)
    try:
        yield from loop.first(starts)
        yield from meanwhile
        while loop.busy:
            yield from loop.round()
    finally:
        loop.cancel()


class _Loop:
    """Who decodes next and who waits."""

    def __init__(self, engine: Engine, helpers: HelperSet, sampling: Sampling) -> None:
        self.engine, self.helpers = engine, helpers
        self.sampling = replace(sampling, stop=(*sampling.stop, *helpers.end_tags))
        self.ready: list[_Dialogue] = []
        self.here: list[tuple[_Dialogue, HelperRequest]] = []  # for helpers of this process
        self.waiting: dict[Future[Outcome], tuple[_Dialogue, HelperRequest]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.ready or self.here or self.waiting)

    def first(self, starts: Sequence[DialogueStart]) -> Iterator[tuple[int, int, Trajectory]]:
        """The first turn: rows of one start share their prompt."""
        prompts, counts = [s.prompt_ids for s in starts], [s.n for s in starts]
        for i, j, sample in self.engine.generate(prompts, counts, self.sampling, [s.seed for s in starts]):
            s = starts[i]
            d = _Dialogue((i, j), s.question, s.seed, self.helpers, list(s.prompt_ids), len(s.prompt_ids))
            yield from self._taken(d, sample)

    def round(self) -> Iterator[tuple[int, int, Trajectory]]:
        """Ask the helpers of this process, take in replies that have come, decode who can go on."""
        self._ask_here()
        self._collect(block=not self.ready)
        batch, self.ready = self.ready, []
        for rows in fitting(batch, self.helpers.context):
            sampling = replace(self.sampling, max_new_tokens=max(d.room for d in rows))
            seeds = [derive(d.seed, "turn", d.place[1], d.turn) for d in rows]
            for at, _, sample in self.engine.generate([tuple(d.ids) for d in rows], 1, sampling, seeds):
                yield from self._taken(rows[at], sample)

    def cancel(self) -> None:
        for future in self.waiting:
            future.cancel()

    def _taken(self, d: _Dialogue, sample: Sample) -> Iterator[tuple[int, int, Trajectory]]:
        request = d.take(sample)
        if request is not None and self.helpers.remote(request.role):
            self.waiting[self.helpers.submit(request)] = (d, request)
        elif request is not None:
            self.here.append((d, request))
        elif d.ended is None:
            self.ready.append(d)
        else:
            yield (*d.place, d.trajectory(self.sampling.temperature))

    def _ask_here(self) -> None:
        asked, self.here = sorted(self.here, key=lambda a: a[0].place), []
        for role in dict.fromkeys(r.role for _, r in asked):
            of_role = [(d, r) for d, r in asked if r.role == role]
            outcomes = self.helpers.respond_batch(role, [r for _, r in of_role])
            for (d, request), outcome in zip(of_role, outcomes, strict=True):
                self._answered(d, request, outcome)

    def _collect(self, *, block: bool) -> None:
        if not self.waiting:
            return
        done, _ = wait(self.waiting, timeout=None if block else 0, return_when=FIRST_COMPLETED)
        for future in done:
            d, request = self.waiting.pop(future)
            self._answered(d, request, future.result())

    def _answered(self, d: _Dialogue, request: HelperRequest, outcome: Outcome) -> None:
        d.answer(request, outcome)
        self.ready.append(d)


def fitting(rows: Sequence[_Dialogue], context: int | None) -> list[list[_Dialogue]]:
    """Split ``rows`` so that in each part the longest row plus the largest room stays within ``context``."""
    parts: list[list[_Dialogue]] = []
    for d in sorted(rows, key=lambda d: (-d.room, d.place)):
        if parts and (context is None or max(len(x.ids) for x in (*parts[-1], d)) + parts[-1][0].room <= context):
            parts[-1].append(d)
        else:
            parts.append([d])
    return parts
