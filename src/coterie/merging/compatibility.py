"""May these two experts be merged? Four outcomes, from what was measured on held-out problems and by the gradient probe.

Weights alone do not decide it (see :mod:`coterie.merging.verdict`), and neither does a cosine near 0. What counts is how each
expert scores on the *other's* tasks, since a sum carries both deltas; the probe can add that the tasks pull apart. Without
scores the verdict says which evidence is missing. How often the outcomes are right is measured on pairs built to conflict, to
help and to be unrelated: ``coterie bench verdict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Interval = tuple[float, float]
Outcome = Literal["merge", "search", "do not merge", "not enough data"]
Z = 3.0  # standard deviations beyond which a cosine counts as more than chance
MARGIN = 0.5  # share of its gain that an expert may lose to the other without the pair being called incompatible


@dataclass(frozen=True)
class Evidence:
    """About experts i and j. None: not measured. Intervals are 95%, of differences of accuracy (share of right answers).

    ``scores``: what each gains and does to the other. ``overlap``: interval of the probe's I where its controls hold.
    ``weights``: cosine of the deltas, and its z when whole rows are flipped; they count only where there are no scores.
    """

    names: tuple[str, str]
    scores: Scored | None = None
    overlap: Interval | None = None
    weights: tuple[float, float] | None = None


@dataclass(frozen=True)
class Scored:
    """``gain``: each expert on its own tasks, minus base. ``transfer``: (expert j on the tasks of i, expert i on the tasks of
    j), minus base."""

    gain: tuple[float, float]
    gain_interval: tuple[Interval, Interval]
    transfer: tuple[float, float]
    transfer_interval: tuple[Interval, Interval]


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reasons: tuple[str, ...]

    def to_json(self, names: tuple[str, str]) -> dict[str, Any]:
        return {"experts": list(names), "outcome": self.outcome, "reasons": list(self.reasons)}


def overlap_of(pair: Mapping[str, Any], controls: Mapping[str, Any]) -> Interval | None:
    """The interval of a pair's I, from a probe's figures; None where a control of either task is unresolved or failed."""
    if any(controls[t]["failed"] or not controls[t]["resolved"] for t in pair["tasks"]):
        return None
    low, high = pair["I_interval"]
    return low, high


def decide(e: Evidence) -> Verdict:
    """The rule, first match wins:

    1. one expert lowers the other's tasks (its transfer interval lies below 0), or the gradients oppose each other (I below
       0): *do not merge*; mix the tasks in one run, or distil;
    2. without scores: *search* if the deltas oppose each other beyond chance, since a plain sum cancels part of both; else *not
       enough data*. Either way the missing evidence is named;
    3. an expert's own gain is not above 0: *not enough data*; there is nothing yet whose keeping could be judged;
    4. both raise the other's tasks by more than half of its own gain: *search*, from lambda 0.5 on; they learned much of the
       same, and a plain sum goes about twice as far (in trials it lost what both had gained);
    5. neither can cost the other more than half of its gain (low ends above ``-MARGIN * gain``): *merge*;
    6. otherwise *search*: sweep lambda, or adapt on all tasks after the merge, and score the result.
    """
    s = e.scores
    reasons = [_transfer(e.names, s, k) for k in (0, 1) if s.transfer_interval[k][1] < 0] if s else []
    if e.overlap is not None and e.overlap[1] < 0:
        reasons.append("the gradients of the tasks oppose each other at the base")
    if reasons:
        return Verdict("do not merge", tuple(reasons))
    if s is None:
        return _without_scores(e)
    flat = [k for k in (0, 1) if s.gain_interval[k][0] <= 0]
    if flat:
        return Verdict(
            "not enough data", tuple(f"{e.names[k]}: its own gain may be 0 {_shown(s.gain_interval[k])}" for k in flat)
        )
    if all(s.transfer_interval[k][0] > MARGIN * s.gain[k] for k in (0, 1)):
        return Verdict(
            "search", ("they learned much of the same: a plain sum goes about twice as far; start at lambda 0.5",)
        )
    risky = [k for k in (0, 1) if s.transfer_interval[k][0] < -MARGIN * s.gain[k]]
    if risky:
        return Verdict("search", tuple(_transfer(e.names, s, k) for k in risky))
    return Verdict("merge", tuple(_transfer(e.names, s, k) for k in (0, 1)))


def _without_scores(e: Evidence) -> Verdict:
    missing = ["scores of each on the other's tasks"]
    missing += ["resolved gradients of the tasks (coterie probe)"] if e.overlap is None else []
    lacking = f"missing: {' and '.join(missing)}"
    if e.weights is None or e.weights[1] > -Z:
        return Verdict("not enough data", (lacking,))
    cosine, z = e.weights
    return Verdict("search", (f"the deltas oppose each other (cosine {cosine:+.2e}, z {z:+.1f})", lacking))


def spoken(verdict: Mapping[str, Any]) -> str:
    """A verdict's JSON as one line."""
    return f"{' and '.join(verdict['experts'])}: {verdict['outcome']}; {'; '.join(verdict['reasons'])}"


def _transfer(names: tuple[str, str], s: Scored, k: int) -> str:
    return f"{names[1 - k]} moves the tasks of {names[k]} by {_shown(s.transfer_interval[k])}"


def _shown(interval: Interval) -> str:
    return f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"
