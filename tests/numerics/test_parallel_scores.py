"""Retention by hand, and that its intervals know what they do not know."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.parallel.scores import difference, pooled, rates, retention, score, unscored

TASKS = ["a", "b"]
BASE = {"a": [0.0, 0.5, 0.0, 0.5], "b": [0.5, 0.5]}  # .25, .5 -> .375
EXPERT = {"a": [1.0, 1.0, 0.5, 0.5], "b": [1.0, 1.0]}  # .75, 1 -> .875
MERGED = {"a": [0.5, 0.5, 0.5, 0.5], "b": [1.0, 0.75]}  # .5, .875 -> .6875


def test_rates_and_scores_by_hand() -> None:
    assert rates({"tasks": {"a": {"correct": [1, 0, 4], "scored": [2, 4, 4]}}}) == {"a": [0.5, 0.0, 1.0]}
    assert [score(m, TASKS) for m in (BASE, EXPERT, MERGED)] == [0.375, 0.875, 0.6875]


def test_both_retentions_by_hand() -> None:
    got = retention(BASE, EXPERT, MERGED, TASKS)
    assert got["score_retention"] == pytest.approx(0.6875 / 0.875)
    assert got["gain_retention"] == pytest.approx(0.3125 / 0.5)
    low, high = got["gain_retention_interval"]
    assert low < 0.625 < high
    assert retention(BASE, EXPERT, EXPERT, TASKS)["gain_retention_interval"] == [1.0, 1.0]  # paired: no noise left


def test_answers_whose_scoring_failed_are_counted_and_change_no_figure() -> None:
    lost = {"asked": {"samples": 4}, "tasks": {"a": {"correct": [1, 0, 4, 0], "scored": [2, 4, 4, 0]}}}
    assert unscored(lost) == 6
    assert score(rates(lost), ["a"]) == 0.5  # of 1/2, 0, 1: as wrong the fourth would make it 3/8
    nan = float("nan")
    whole = [{"a": m["a"]} for m in (BASE, EXPERT, MERGED)]
    holes = [{"a": [*m["a"], *more]} for m, more in zip(whole, ([nan, 1.0], [0.5, 0.0], [1.0, nan]), strict=True)]
    assert retention(*holes, ["a"]) == retention(*whole, ["a"])
    assert difference(holes[0], holes[2], ["a"]) == difference(whole[0], whole[2], ["a"])
    assert pooled(holes[0], [(holes[1], ["a"])], holes[2]) == pooled(whole[0], [(whole[1], ["a"])], whole[2])
    with pytest.raises(CoterieError, match="no problem of a has a scored answer of every model"):
        difference({"a": [nan, 1.0]}, {"a": [0.0, nan]}, ["a"])


def test_no_gain_to_keep_is_undefined_and_not_infinite() -> None:
    got = retention(BASE, BASE, MERGED, TASKS)
    assert got["gain_retention"] is None and got["gain_retention_interval"] is None


def test_difference_is_paired() -> None:
    got = difference(EXPERT, EXPERT, TASKS)
    assert got == {"difference": 0.0, "interval": [0.0, 0.0]}


def test_interval_of_a_difference_covers_the_truth_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        skill = rng.uniform(size=60)
        first = {"a": rng.binomial(4, skill) / 4}
        second = {"a": rng.binomial(4, skill) / 4}
        low, high = difference(first, second, ["a"])["interval"]
        hits += low <= 0 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_pooled_retention_sums_before_it_divides() -> None:
    """Task a: gain 1/2, kept 1/4; task b: gain 1/2, kept 3/8. An expert that gained next to nothing must not rule the sum."""
    got = pooled(BASE, [(EXPERT, ["a"]), (EXPERT, ["b"])], MERGED)
    assert got["gain_retention"] == pytest.approx((0.25 + 0.375) / (0.5 + 0.5))
    assert got["score_retention"] == pytest.approx((0.5 + 0.875) / (0.75 + 1.0))
    low, high = got["gain_retention_interval"]
    assert low < 0.625 < high
    tiny = {"a": [0.0, 0.5, 0.0, 0.52], "b": [0.5, 0.5]}
    assert pooled(BASE, [(tiny, ["a"]), (EXPERT, ["b"])], MERGED)["gain_retention"] < 2
    assert pooled(BASE, [(BASE, ["a"])], MERGED)["gain_retention"] is None
