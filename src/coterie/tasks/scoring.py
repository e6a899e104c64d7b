"""Marks answers: extraction, then a verifier, in the trainer if it only compares and in a caged worker otherwise.

Scoring never turns a failure into "wrong" unseen: every :class:`Score` says what happened, and :attr:`Scorer.counts` counts it.
"""

from __future__ import annotations

import json
import math
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from coterie.config import ScoringConfig
from coterie.errors import CoterieError
from coterie.sandbox import gate
from coterie.sandbox.pool import Pool
from coterie.tasks import reasoning_gym
from coterie.tasks.base import parse_id
from coterie.tasks.composite import VERIFIERS, check_verifier, parts
from coterie.tasks.extract import extract_answer, extract_code
from coterie.tasks.verifiers import BadReference, exact, format_ok, normalise, numeric
from coterie.types import Problem

Verifier = Callable[[Problem, str], float | None]
"""A verifier of the user's own: (problem, extracted answer) -> reward, or None to abstain. Runs in the trainer."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth. ``reward`` None: not scored (neither right nor wrong).

    ``outcome``: ``ok``; ``no_answer`` (nothing to extract, 0); ``breach`` (the answer broke a rule of the cage, 0; ``detail``
    starts with the kind); ``error`` (the task's scorer raised on this text, 0); ``bad_reference``, ``abstained``, ``invalid``
    (NaN or infinite), ``unconfined`` (a peer's text on a system without the cage): None.
    """

    reward: float | None
    outcome: str = "ok"
    detail: str = ""
    extracted: str | None = None

    @property
    def counted_as(self) -> str:
        """The key in :attr:`Scorer.counts`: the outcome, for a breach with its kind (``breach:timeout``)."""
        return f"breach:{self.detail.partition(':')[0]}" if self.outcome == "breach" else self.outcome


class Scorer:
    """Scores answers; a context manager that owns the workers (started when first needed).

    Args:
        verifiers: verifiers of the user's own, by name, for problems whose ``verifier`` names them.

    Raises:
        UserError: a problem names an unknown verifier.
        CoterieError: an own verifier raised or returned something else than a number or None.
    """

    def __init__(self, cfg: ScoringConfig | None = None, verifiers: Mapping[str, Verifier] | None = None) -> None:
        self.cfg = cfg or ScoringConfig()
        self.counts: Counter[str] = Counter()
        self._own = dict(verifiers or {})
        taken = sorted(set(self._own) & set(VERIFIERS))
        if taken:
            raise CoterieError(f"verifier {taken[0]!r} is built in; give yours another name")
        self._pool = Pool(self.cfg.workers, timeout_s=self.cfg.timeout_s, memory_mb=self.cfg.memory_mb)
        self._lock = threading.Lock()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.close()

    def submit(self, problem: Problem, text: str, *, untrusted: bool = False) -> Future[Score]:
        """Score the response ``text``; returns at once. ``untrusted``: a peer wrote it (refused where the cage has gaps)."""
        check_verifier(problem.verifier, problem.id, self._own)
        weighted = parts(problem.verifier)
        if len(weighted) == 1 and weighted[0][1] == 1.0:
            out = self._one(weighted[0][0], problem, text, untrusted)
        else:
            out = _weighted_sum([(self._one(name, problem, text, untrusted), weight) for name, weight in weighted])
        out.add_done_callback(self._count)
        return out

    def score(self, pairs: Iterable[tuple[Problem, str]], *, untrusted: bool = False) -> list[Score]:
        """Score ``(problem, response)`` pairs, in order."""
        return [future.result() for future in [self.submit(p, text, untrusted=untrusted) for p, text in pairs]]

    def cage_report(self) -> dict[str, str | None]:
        """Wall -> None if it stands, else why it does not. Starts a worker if none runs."""
        return self._pool.report()

    def confined(self) -> bool:
        """Whether files, system calls and limits are walled in, so that text of others may be scored here."""
        report = self.cage_report()
        return all(report.get(wall, "missing") is None for wall in REQUIRED_WALLS)

    def _one(self, verifier: str, problem: Problem, text: str, untrusted: bool) -> Future[Score]:
        if verifier == "format":
            return _done(Score(format_ok(text)))
        answer = extract_code(text) if verifier == "code" else extract_answer(text)
        if answer is None:
            return _done(Score(0.0, "no_answer"))
        if verifier in ("exact", "numeric"):
            return _done(_compare(verifier, problem, answer))
        if verifier in self._own:
            return _done(_call_own(verifier, self._own[verifier], problem, answer))
        if verifier in ("task", "task_partial") and reasoning_gym.has_plain_scorer(parse_id(problem.id).name):
            return _done(Score(_plain(problem, answer, verifier == "task_partial"), extracted=answer))
        if untrusted and not self.cfg.allow_unconfined and not self.confined():
            return _done(Score(None, "unconfined", "the cage has gaps here; see cage_report()", answer))
        return _mapped(self._pool.submit(*_job(verifier, problem, answer)), answer)

    def _count(self, future: Future[Score]) -> None:
        if not future.cancelled() and future.exception() is None:
            with self._lock:
                self.counts[future.result().counted_as] += 1


REQUIRED_WALLS = ("no new privileges", "files", "system calls", "memory, time and output")


def _compare(verifier: str, problem: Problem, answer: str) -> Score:
    if problem.reference is None:
        return Score(None, "bad_reference", f"{problem.id} has no reference to compare with", answer)
    try:
        reward = (exact if verifier == "exact" else numeric)(answer, problem.reference)
    except BadReference as e:
        return Score(None, "bad_reference", str(e), answer)
    return Score(reward, extracted=answer)


def _plain(problem: Problem, answer: str, partial: bool) -> float:
    """A task whose library scorer compares texts and nothing else."""
    assert problem.reference is not None, problem.id
    if partial:
        parsed = parse_id(problem.id)
        source = reasoning_gym.dataset(parsed.name, {k: json.loads(v) for k, v in parsed.params})
        return float(source.score_answer(normalise(answer), {"answer": normalise(problem.reference)}))
    return exact(answer, problem.reference)


def _call_own(name: str, verifier: Verifier, problem: Problem, answer: str) -> Score:
    try:
        reward = verifier(problem, answer)
    except Exception as e:
        raise CoterieError(f"verifier {name!r} raised {type(e).__name__} on {problem.id}: {e}") from e
    if reward is None:
        return Score(None, "abstained", extracted=answer)
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise CoterieError(
            f"verifier {name!r} must return one number or None per answer, got {type(reward).__name__} on {problem.id}"
        )
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        return Score(None, "invalid", f"verifier {name!r} returned a number that is not finite", answer)
    return Score(value, extracted=answer)


def _job(verifier: str, problem: Problem, answer: str) -> tuple[str, Any]:
    """(scorer in the worker, what it needs)."""
    if verifier == "math":
        return "math", (answer, problem.reference or "")
    if verifier == "code":
        return "code", (answer, problem.reference or "")
    parsed = parse_id(problem.id)
    params = {key: json.loads(value) for key, value in parsed.params}
    entry = problem.metadata.get("entry") or reasoning_gym.item(parsed.name, params, parsed.index)
    unreviewed = reasoning_gym.evaluates_text(parsed.name) and not gate.knows(parsed.name)
    job = {"name": parsed.name, "params": params, "entry": pickle.dumps(entry, protocol=5), "answer": answer}
    return "task_alone" if unreviewed else "task", job | {"partial": verifier == "task_partial"}


def _done(score: Score) -> Future[Score]:
    out: Future[Score] = Future()
    out.set_result(score)
    return out


def _mapped(raw: Future[dict[str, Any]], answer: str) -> Future[Score]:
    out: Future[Score] = Future()

    def finish(done: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if error is not None:
            out.set_exception(error)
        else:
            out.set_result(Score(**done.result(), extracted=answer))

    raw.add_done_callback(finish)
    return out


def _weighted_sum(scored: list[tuple[Future[Score], float]]) -> Future[Score]:
    """Sum of weight x reward once all are there. The first part that is not ``ok`` gives outcome and detail."""
    out: Future[Score] = Future()
    lock, left = threading.Lock(), [len(scored)]

    def finish(_: Future[Score]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        error = next((f.exception() for f, _ in scored if f.exception() is not None), None)
        if error is not None:
            out.set_exception(error)
            return
        results = [(f.result(), w) for f, w in scored]
        shown = next(
            (s for s, _ in results if s.outcome != "ok"), next((s for s, _ in results if s.extracted), results[0][0])
        )
        rewards = [None if s.reward is None else s.reward * w for s, w in results]
        total = None if any(r is None for r in rewards) else math.fsum(r for r in rewards if r is not None)
        out.set_result(replace(shown, reward=total))

    for future, _ in scored:
        future.add_done_callback(finish)
    return out
