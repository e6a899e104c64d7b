"""The merge verdict: which evidence gives which outcome, and how its calibration is worked out."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from coterie.bench.verdict import Member, Negated, auc, halves, judge
from coterie.merging.compatibility import Evidence, decide
from coterie.merging.probe import ProbeSettings, Scores
from coterie.tasks.scoring import Score

GAINED = ((0.1, 0.3), (0.1, 0.3))


def evidence(transfer: Any, gain_interval: Any = GAINED, overlap: Any = None) -> Evidence:
    return Evidence(("maths", "logic"), (0.2, 0.2), gain_interval, transfer, overlap)


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
