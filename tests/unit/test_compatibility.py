"""The merge verdict: which evidence gives which outcome, and how its calibration is worked out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.bench.verdict import Member, Negated, auc, halves, judge
from coterie.merging.compatibility import Evidence, Scored, decide, overlap_of
from coterie.merging.probe import ProbeSettings, Scores
from coterie.parallel.evidence import Side, by_expert, sole_owners
from coterie.parallel.evidence import evidence as build_evidence
from coterie.tasks.scoring import Score

GAINED = ((0.1, 0.3), (0.1, 0.3))


def evidence(transfer: Any, gain_interval: Any = GAINED, overlap: Any = None) -> Evidence:
    return Evidence(("maths", "logic"), Scored((0.2, 0.2), gain_interval, (0.0, 0.0), transfer), overlap)


def test_harm_to_the_other_comes_first() -> None:
    v = decide(evidence(((-0.2, -0.05), (0.0, 0.1))))
    assert v.outcome == "do not merge" and v.reasons == ("logic moves the tasks of maths by [-0.200, -0.050]",)
    assert decide(evidence(((-0.2, -0.05), (0.0, 0.1)), ((-0.1, 0.1), (0.1, 0.3)))).outcome == "do not merge"


def test_opposed_gradients_are_a_reason_and_agreeing_ones_are_not() -> None:
    calm = ((-0.02, 0.02), (-0.02, 0.02))
    assert decide(evidence(calm, overlap=(-2.0, -0.5))).outcome == "do not merge"
    assert decide(evidence(calm, overlap=(-2.0, 0.5))).outcome == "merge"
    assert decide(evidence(calm)).outcome == "merge"


def test_without_a_gain_there_is_nothing_to_keep() -> None:
    v = decide(evidence(((-0.02, 0.02), (-0.02, 0.02)), ((0.1, 0.3), (-0.05, 0.3))))
    assert v.outcome == "not enough data" and "logic" in v.reasons[0]


def test_wide_intervals_ask_for_a_search_and_narrow_ones_allow_the_merge() -> None:
    assert decide(evidence(((-0.15, 0.15), (-0.02, 0.02)))).outcome == "search"
    assert decide(evidence(((-0.09, 0.15), (-0.02, 0.02)))).outcome == "merge"  # at most 0.1 = half of the gain


def test_experts_that_learned_the_same_overshoot_in_a_plain_sum() -> None:
    v = decide(evidence(((0.12, 0.3), (0.11, 0.3))))
    assert v.outcome == "search" and "lambda 0.5" in v.reasons[0]
    assert decide(evidence(((0.12, 0.3), (0.05, 0.3)))).outcome == "merge"


def test_without_scores_the_verdict_says_what_is_missing() -> None:
    names = ("maths", "logic")
    nothing = decide(Evidence(names))
    assert nothing.outcome == "not enough data"
    assert nothing.reasons == (
        "missing: scores of each on the other's tasks and resolved gradients of the tasks (coterie probe)",
    )
    assert decide(Evidence(names, overlap=(-2.0, -0.5))).outcome == "do not merge"
    calm = decide(Evidence(names, overlap=(-2.0, 0.5)))
    assert calm.outcome == "not enough data" and "gradients" not in calm.reasons[0]
    for weights, outcome in (
        ((-0.3, -40.0), "search"),
        ((-0.01, -2.0), "not enough data"),
        ((0.3, 40.0), "not enough data"),
    ):
        found = decide(Evidence(names, weights=weights))
        assert found.outcome == outcome and "missing: scores" in found.reasons[-1]
    assert (
        "the deltas oppose each other (cosine -3.00e-01, z -40.0)"
        in decide(Evidence(names, weights=(-0.3, -40.0))).reasons
    )
    scored = evidence(((-0.02, 0.02), (-0.02, 0.02)))
    assert decide(replace(scored, weights=(-0.3, -40.0))).outcome == "merge"  # scores outrank weights


@pytest.mark.parametrize(("resolved", "failed", "known"), [(True, "", True), (False, "", False), (True, "why", False)])
def test_the_probe_is_evidence_only_where_its_controls_hold(resolved: bool, failed: str, known: bool) -> None:
    controls = {"a": {"resolved": True, "failed": ""}, "b": {"resolved": resolved, "failed": failed}}
    pair = {"tasks": ["a", "b"], "I_interval": [-2.0, -1.0]}
    assert overlap_of(pair, controls) == ((-2.0, -1.0) if known else None)
    base, better = {"x": [0.0] * 8, "y": [0.0] * 8}, {"x": [1.0] * 8, "y": [1.0] * 8}
    sides = (Side(base, better, base, ["x"]), Side(base, better, base, ["y"]))
    found = build_evidence(("b", "a"), sides, {"pairs": [pair], "controls": controls})
    assert found.overlap == ((-2.0, -1.0) if known else None)
    assert found.scores is not None and found.scores.gain == (1.0, 1.0)
    assert found.scores.transfer_interval == ((0.0, 0.0), (0.0, 0.0))
    assert decide(found).outcome == ("do not merge" if known else "merge")
    assert build_evidence(("a", "b"), sides, None).overlap is None


def test_tasks_of_a_probe_become_their_experts_and_shared_ones_belong_to_none() -> None:
    owner = sole_owners({"maths": ["gcd", "chain_sum", "bits"], "logic": ["bits", "puzzles"]})
    assert owner == {"gcd": "maths", "chain_sum": "maths", "puzzles": "logic"}
    n = 3 * 2 * 2
    scores = Scores(
        tasks=("gcd", "puzzles", "chain_sum"),
        task=np.repeat([0, 1, 2], 4),
        group=np.repeat(np.arange(6), 2),
        reward=np.tile([1.0, 0.0], 6),
        length=np.ones(n, int),
        entropy=np.ones(n),
        concentration=np.ones(n),
        distinct=np.array([0.5, 0.25, 1.0]),
        gram=np.eye(n),
        reference_norm=(3.0, None, 4.0),
        floor=0.0,
        values=1,
        settings=ProbeSettings(),
    )
    got = by_expert(scores, owner)
    assert got.tasks == ("maths", "logic") and got.task.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert got.distinct.tolist() == [0.75, 0.25] and got.reference_norm == (pytest.approx(12.5**0.5), None)


def test_auc_by_hand() -> None:
    assert auc([3.0, 2.0], [1.0, 2.0]) == pytest.approx(3.5 / 4)
    assert auc([], [1.0]) is None


def row(kind: str, cosine: float | None, kept: float | None, outcome: str = "merge") -> dict[str, Any]:
    return {
        "kind": kind,
        "predictors": {"cosine": cosine},
        "retention": {"1": [kept, 1.0], "0.5": [1.0, 1.0]},
        "verdict": {"outcome": outcome},
    }


def test_judging_counts_what_is_known_and_ranks_by_the_gain_kept() -> None:
    rows = [row("conflict", -0.9, 0.1, "do not merge"), row("conflict", -0.1, None, "not enough data")]
    rows += [
        row("helpful", 0.9, 0.9),
        row("unrelated", 0.0, 0.5),
        row("unrelated", 0.2, 0.7),
        row("unrelated", None, 0.6),
    ]
    got = judge(rows)
    assert got["predictors"]["cosine"]["auc_conflict_lower"] == 1.0
    assert got["predictors"]["cosine"]["known"] == 5
    assert got["predictors"]["cosine"]["gain_kept"]["1"] == {
        "spearman": pytest.approx(1.0),
        "p": pytest.approx(0.0),
        "pairs": 4,
    }
    assert got["predictors"]["cosine"]["gain_kept"]["0.5"]["spearman"] is None  # all kept the same: nothing to rank
    assert got["verdicts"]["conflict"] == {"do not merge": 1, "not enough data": 1}
    assert got["least_gain_kept"]["1"]["conflict"] == pytest.approx(0.1)
    assert got["pairs_whose_experts_both_gained"] == {"conflict": 1, "helpful": 1, "unrelated": 3}


def test_halves_never_share_a_problem_and_only_a_conflict_turns_rewards() -> None:
    n = 2 * 4 * 3
    scores = Scores(
        tasks=("a", "b"),
        task=np.repeat([0, 1], 12),
        group=np.repeat(np.arange(8), 3),
        reward=np.tile([1.0, 0.0, 0.0], 8),
        length=np.ones(n, int),
        entropy=np.ones(n),
        concentration=np.ones(n),
        distinct=np.ones(2),
        gram=np.arange(n * n, dtype=float).reshape(n, n),
        reference_norm=(None, None),
        floor=0.0,
        values=1,
        settings=ProbeSettings(),
    )
    for kind, groups, right in (("helpful", {2, 3}, 1), ("conflict", {2, 3}, 2), ("unrelated", {4, 5, 6, 7}, 1)):
        got = halves(scores, kind)
        assert set(got.group[got.task == 0]) == {0, 1} and set(got.group[got.task == 1]) == groups
        assert got.reward[got.task == 1][:3].sum() == right and got.reward[got.task == 0][:3].sum() == 1
    rows = np.flatnonzero(scores.task == 1)
    assert (halves(scores, "unrelated").gram[6:, 6:] == scores.gram[np.ix_(rows, rows)]).all()


def test_negated_scorer_pays_wrong_answers_and_leaves_failures_unscored() -> None:
    class Given:
        def __init__(self, reward: float | None) -> None:
            self.reward = reward

        def submit(self, problem: Any, text: str) -> Future[Score]:
            out: Future[Score] = Future()
            out.set_result(Score(self.reward))
            return out

    assert [Negated(Given(r)).submit(None, "").result(1).reward for r in (1.0, 0.0, None)] == [0.0, 1.0, None]
    assert Member("gcd", True, 0) != Member("gcd", False, 0)
