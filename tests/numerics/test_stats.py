"""Statistics against scipy, brute force and simulation."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from coterie.stats import (
    bootstrap_interval,
    cluster_interval,
    compare_paired,
    holm,
    mean_interval,
    pass_at_k,
    sign_flip_p,
    wilson_interval,
)


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (5, 0, 2), (5, 5, 5), (7, 1, 7)])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer(n: int, c: int, k: int) -> None:
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k([n], [c], k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_what_it_cannot_estimate() -> None:
    for scored, correct, k in ([[2], [1], 4], [[2], [3], 1], [[2, 2], [1], 1], [[2], [1], 0]):
        with pytest.raises(ValueError, match="pass_at_k"):
            pass_at_k(scored, correct, k)  # type: ignore[arg-type]


@pytest.mark.parametrize(("c", "n"), [(0, 7), (3, 10), (50, 100), (10, 10)])
def test_wilson_agrees_with_scipy(c: int, n: int) -> None:
    want = scipy_stats.binomtest(c, n).proportion_ci(0.9, "wilson")
    assert wilson_interval(c, n, 0.9) == pytest.approx((want.low, want.high), abs=1e-9)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_cluster_interval_covers_the_truth_where_samples_of_a_problem_are_alike() -> None:
    """Pass rates from Beta(0.4, 0.8) (mean 1/3), 32 problems x 4 samples, 2,000 draws: near 95%.

    Treating the 128 samples as independent covers far less: that is what clustering is for.
    """
    rng = np.random.default_rng(0)
    clustered = naive = 0
    for _ in range(2000):
        correct = rng.binomial(4, rng.beta(0.4, 0.8, 32))
        low, high = cluster_interval((correct / 4).tolist())
        clustered += low <= 1 / 3 <= high
        low, high = wilson_interval(int(correct.sum()), 128)
        naive += low <= 1 / 3 <= high
    assert clustered / 2000 > 0.93
    assert naive / 2000 < 0.85


def test_cluster_interval_edges() -> None:
    assert cluster_interval([]) == (0.0, 1.0)
    assert cluster_interval([1.0] * 5)[0] < 0.8  # five problems all solved do not prove much
    with pytest.raises(ValueError, match="within"):
        cluster_interval([1.2])


def test_bootstrap_is_seeded_and_agrees_with_scipy() -> None:
    x = np.random.default_rng(1).normal(size=40).tolist()
    assert bootstrap_interval(x, seed=3) == bootstrap_interval(x, seed=3)
    want = scipy_stats.bootstrap((x,), np.mean, method="percentile", rng=np.random.default_rng(2)).confidence_interval
    assert bootstrap_interval(x) == pytest.approx((want.low, want.high), abs=0.02)


def test_paired_comparison_agrees_with_scipy() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(0.5, 1, 8).tolist(), rng.normal(0, 1, 8).tolist()
    got = compare_paired(a, b)
    want = scipy_stats.ttest_rel(a, b)
    ci = want.confidence_interval(0.95)
    assert (got.p_t, got.low, got.high) == pytest.approx((want.pvalue, ci.low, ci.high), abs=1e-9)
    flip = scipy_stats.permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert got.p_sign_flip == pytest.approx(flip.pvalue, abs=1e-9)


def test_five_seeds_cannot_reach_p_below_one_sixteenth_by_sign_flips() -> None:
    assert sign_flip_p([0.1, 0.2, 0.1, 0.3, 0.2]) == 2 / 32


def test_many_pairs_use_monte_carlo_near_the_t_test() -> None:
    d = np.random.default_rng(5).normal(0.4, 1, 30).tolist()
    assert sign_flip_p(d) == pytest.approx(scipy_stats.ttest_1samp(d, 0).pvalue, abs=0.01)


def test_no_spread() -> None:
    same = compare_paired([1.0, 2.0], [1.0, 2.0])
    assert (same.p_t, same.effect, same.difference) == (1.0, 0.0, 0.0)
    shift = compare_paired([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert shift.p_t == 0.25 and math.isinf(shift.effect)
    with pytest.raises(ValueError, match="at least 2"):
        compare_paired([1.0], [1.0])


def test_mean_interval_of_one_value_is_unbounded_and_holm_of_none_is_empty() -> None:
    assert mean_interval([1.0]) == (-math.inf, math.inf)
    assert holm([]) == []
