"""May these two experts be merged? Four outcomes, from what was measured on held-out problems and by the gradient probe.

Weights alone do not decide it (see :mod:`coterie.merging.verdict`), and neither does a cosine near 0. What counts is how each
expert scores on the *other's* tasks, since a sum carries both deltas; the probe can add that the tasks pull apart. How often
the outcomes are right is measured on pairs built to conflict, to help and to be unrelated: ``coterie bench verdict``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Interval = tuple[float, float]
Outcome = Literal["merge", "search", "do not merge", "not enough data"]
MARGIN = 0.5  # share of its gain that an expert may lose to the other without the pair being called incompatible


@dataclass(frozen=True)
class Evidence:
    """About experts i and j. Intervals are 95%, in accuracy (share of right answers) unless stated.

    ``gain``: each expert on its own tasks, minus base. ``transfer``: (expert j on the tasks of i, expert i on the tasks of j),
    minus base. ``overlap``: interval of the probe's I, if there was a probe whose controls were resolved.
    """

    names: tuple[str, str]
    gain: tuple[float, float]
    gain_interval: tuple[Interval, Interval]
    transfer_interval: tuple[Interval, Interval]
    overlap: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reasons: tuple[str, ...]


def decide(e: Evidence) -> Verdict:
    """The rule, first match wins:

    1. one expert lowers the other's tasks (its transfer interval lies below 0), or the gradients oppose each other (I below
       0): *do not merge*; mix the tasks in one run, or distil;
    2. an expert's own gain is not above 0: *not enough data*; there is nothing yet whose keeping could be judged;
    3. both raise the other's tasks by more than half of its own gain: *search*, from lambda 0.5 on; they learned much of the
       same, and a plain sum goes about twice as far (in trials it lost what both had gained);
    4. neither can cost the other more than half of its gain (low ends above ``-MARGIN * gain``): *merge*;
    5. otherwise *search*: sweep lambda, or adapt on all tasks after the merge, and score the result.
    """
    harmed = [k for k in (0, 1) if e.transfer_interval[k][1] < 0]
    reasons = [_transfer(e, k) for k in harmed]
    if e.overlap is not None and e.overlap[1] < 0:
        reasons.append("the gradients of the tasks oppose each other at the base")
    if reasons:
        return Verdict("do not merge", tuple(reasons))
    flat = [k for k in (0, 1) if e.gain_interval[k][0] <= 0]
    if flat:
        return Verdict(
            "not enough data", tuple(f"{e.names[k]}: its own gain may be 0 {_shown(e.gain_interval[k])}" for k in flat)
        )
    if all(e.transfer_interval[k][0] > MARGIN * e.gain[k] for k in (0, 1)):
        return Verdict(
            "search", ("they learned much of the same: a plain sum goes about twice as far; start at lambda 0.5",)
        )
    risky = [k for k in (0, 1) if e.transfer_interval[k][0] < -MARGIN * e.gain[k]]
    if risky:
        return Verdict("search", tuple(_transfer(e, k) for k in risky))
    return Verdict("merge", tuple(_transfer(e, k) for k in (0, 1)))


def _transfer(e: Evidence, k: int) -> str:
    return f"{e.names[1 - k]} moves the tasks of {e.names[k]} by {_shown(e.transfer_interval[k])}"


def _shown(interval: Interval) -> str:
    return f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"
