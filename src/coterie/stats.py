"""Statistics for evaluation and experiments: pass@k, intervals, paired tests over seeds, correction for many tests.

The independent unit is stated everywhere: problems for one model's score (samples of one problem are not independent),
seeds for a comparison of methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats as scipy_stats

EXACT_UP_TO = 16  # pairs for which all sign patterns are enumerated (65,536); beyond, Monte Carlo


def pass_at_k(scored: Sequence[int], correct: Sequence[int], k: int) -> float:
    """Mean over problems of ``1 - C(n - c, k) / C(n, k)``: the unbiased estimate of solving a problem in k tries
    (Chen et al., arXiv 2107.03374, eq. 1).

    Args:
        scored: per problem, how many answers were scored, n.
        correct: per problem, how many of them were right, c.

    Problems with no scored answer are left out; NaN if that leaves none.

    Raises:
        ValueError: lengths differ, c > n, k < 1, or a problem has answers but fewer than k.
    """
    if k < 1 or len(scored) != len(correct):
        raise ValueError(f"pass_at_k: need k >= 1 and equal lengths, got k={k}, {len(scored)} and {len(correct)}")
    values = []
    for n, c in zip(scored, correct, strict=True):
        if not 0 <= c <= n or 0 < n < k:
            raise ValueError(f"pass_at_k: {c} right of {n} scored answers does not give pass@{k}")
        if n:
            values.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return math.fsum(values) / len(values) if values else math.nan


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion from ``n`` independent trials; (0, 1) if there are none.

    Wilson 1927, JASA 22:209. ``n`` need not be whole (an effective sample size).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson_interval: {successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    z = float(scipy_stats.norm.ppf(0.5 + confidence / 2))
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def cluster_interval(rates: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a mean rate when ``rates`` are per problem (each the mean of correlated samples).

    Wilson's interval at the effective number of trials ``p (1 - p) / (s^2 / m)``, with s the deviation between the m
    problems; where the problems do not differ, m (as if samples of one problem were copies). Unlike a percentile
    bootstrap it has a width when all rates are 0 or 1.

    Raises:
        ValueError: a rate outside [0, 1].
    """
    if any(not 0 <= r <= 1 for r in rates):
        raise ValueError("cluster_interval: rates must be within [0, 1]")
    m = len(rates)
    if m == 0:
        return 0.0, 1.0
    p = math.fsum(rates) / m
    between = float(np.var(rates, ddof=1)) if m > 1 and max(rates) > min(rates) else 0.0
    n = m * p * (1 - p) / between if between else float(m)
    return wilson_interval(min(p * n, n), n, confidence)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of independent ``values`` (per-problem means, per-seed scores)."""
    if not values:
        raise ValueError("bootstrap_interval: no values")
    x = np.asarray(values, np.float64)
    draws = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    low, high = np.quantile(x[draws].mean(1), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean over independent ``values`` (seeds); infinite with fewer than two."""
    if len(values) < 2:
        return -math.inf, math.inf
    x = np.asarray(values, np.float64)
    half = float(scipy_stats.t.ppf(0.5 + confidence / 2, len(x) - 1)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired comparison of two methods over the same seeds; ``difference`` is first minus second."""

    n: int
    difference: float
    low: float  # Student interval of the mean difference
    high: float
    p_t: float  # paired t test, two-sided
    p_sign_flip: float  # exact sign-flip test, two-sided; cannot go below 2 / 2^n
    effect: float  # Hedges' g_z: mean over deviation of the differences, small-sample corrected


def compare_paired(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Comparison:
    """Compare two methods run with the same seeds, entry by entry.

    Where all differences are equal there is no spread to test with: then ``p_t`` is the sign-flip p and ``effect`` 0 (no
    difference) or infinite.

    Raises:
        ValueError: unequal lengths or fewer than two pairs.
    """
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"compare_paired: need two equally long lists of at least 2, got {len(first)}, {len(second)}")
    d = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    n, mean = len(d), float(d.mean())
    flip = sign_flip_p(d.tolist())
    low, high = mean_interval(d.tolist(), confidence)
    spread = float(d.std(ddof=1))
    if spread < 1e-12:
        return Comparison(n, mean, low, high, flip, flip, math.copysign(math.inf, mean) if abs(mean) > 1e-12 else 0.0)
    t = mean / (spread / math.sqrt(n))
    p_t = 2 * float(scipy_stats.t.sf(abs(t), n - 1))
    correction = 1 - 3 / (4 * (n - 1) - 1)
    return Comparison(n, mean, low, high, p_t, flip, correction * mean / spread)


def sign_flip_p(differences: Sequence[float], seed: int = 0, draws: int = 100_000) -> float:
    """Two-sided sign-flip (permutation) p of a mean of zero: no assumption but symmetry under the null.

    Exact up to 16 pairs; beyond, Monte Carlo with the observed pattern counted in.
    """
    d = np.asarray(differences, np.float64)
    observed = abs(d.sum()) * (1 - 1e-12)
    if len(d) <= EXACT_UP_TO:
        signs = np.array(list(product((1.0, -1.0), repeat=len(d))))
        return float((np.abs(signs @ d) >= observed).mean())
    signs = np.random.default_rng(seed).choice((1.0, -1.0), size=(draws, len(d)))
    return float(((np.abs(signs @ d) >= observed).sum() + 1) / (draws + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: reject where at most alpha (Holm 1979, Scand. J. Stat. 6:65)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
