"""The probe's figures against plain vector arithmetic, planted effects, and the controls that must not be fooled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coterie.merging.probe import ProbeSettings, Scores
from coterie.merging.probe_figures import advantages, cross, figures, u_statistic
from coterie.merging.probe_subspace import energy_in, shared_subspaces

G = 4


def made(vectors: np.ndarray, reward: np.ndarray, problems: int, tasks: int = 2, **kw: Any) -> Scores:
    """``vectors`` [tasks * problems * G, d], task by task and group by group."""
    n = len(vectors)
    return Scores(
        tasks=tuple("abc"[:tasks]),
        task=np.repeat(np.arange(tasks), problems * G),
        group=np.repeat(np.arange(tasks * problems), G),
        reward=reward.astype(float),
        length=np.full(n, 5),
        entropy=np.full(n, 0.5),
        concentration=np.full(n, 0.7),
        distinct=np.ones(tasks),
        gram=vectors @ vectors.T,
        reference_norm=(None,) * tasks,
        floor=0.0,
        values=vectors.shape[1],
        settings=ProbeSettings(**kw),
    )


def planted(
    seed: int, cosine: float, problems: int = 40, signal: float = 1.5, mean: float = 0.0, d: int = 60
) -> Scores:
    """Two tasks whose expected gradients have ``cosine``; every score has noise of deviation 1 and a common part ``mean``."""
    rng = np.random.default_rng(seed)
    first, second = np.linalg.qr(rng.normal(size=(d, 2)))[0].T
    towards = [first, cosine * first + np.sqrt(1 - cosine**2) * second]
    vectors, rewards = [], []
    for i in range(2):
        for _ in range(problems):
            common = mean * rng.normal(size=d)
            r = rng.integers(0, 2, G)
            rewards.append(r)
            vectors.append(rng.normal(size=(G, d)) + common + signal * np.outer(2 * r - 1, towards[i]))
    return made(np.concatenate(vectors), np.concatenate(rewards), problems)


def test_every_size_equals_its_definition_written_out() -> None:
    s = planted(0, 0.3, problems=5)
    x = np.linalg.cholesky(s.gram + 1e-9 * np.eye(len(s.gram)))  # vectors with these inner products
    got = figures(s, "mean")
    for i, name in enumerate("ab"):
        v2, s2, gs, pairs = [], [], [], []
        for g in np.unique(s.group[s.task == i]):
            at = s.group == g
            xs, r = x[at], s.reward[at]
            v2.append(np.mean([np.sum((v - xs.mean(0)) ** 2) for v in xs]))
            s2.append(np.mean([np.sum(v**2) for v in xs]))
            gs.append(np.mean([(a - r.mean()) * v for a, v in zip(r, xs, strict=True)], axis=0))
            pairs.append(np.mean([xs[a] @ xs[b] for a in range(G) for b in range(G) if a != b]))
        t = got["tasks"][name]
        assert t["V"] == pytest.approx(np.sqrt(np.mean(v2)), rel=1e-6)
        assert t["S"] == pytest.approx(np.sqrt(np.mean(s2)), rel=1e-6)
        assert t["off_policy"] == pytest.approx(np.mean(pairs) / np.mean(s2), abs=1e-6)
        assert t["U"] == pytest.approx(np.mean([gs[p] @ gs[q] for p in range(5) for q in range(5) if p != q]), abs=1e-6)
        if i == 0:
            first = gs
    assert got["pairs"][0]["I"] == pytest.approx(float(np.mean(first, 0) @ np.mean(gs, 0)), abs=1e-6)


def test_scores_may_be_replaced_by_residuals_only_where_advantages_sum_to_zero() -> None:
    s = planted(1, 0.0, problems=6, mean=1.0)
    for kind, exact in (("mean", True), ("mean_std", True), ("rloo", True), ("batch", False)):
        adv = advantages(s, s.reward, kind)
        leak = figures(s, kind)["tasks"]["a"]["zero_sum_leak"]
        x = np.linalg.cholesky(s.gram + 1e-9 * np.eye(len(s.gram)))
        worst = 0.0
        for g in np.unique(s.group):
            at = s.group == g
            residual = x[at] - x[at].mean(0)
            worst = max(worst, float(np.abs((adv[at] @ x[at] - adv[at] @ residual) / G).max()))
        assert (worst < 1e-9) == exact and (leak < 1e-9) == exact, kind


@pytest.mark.parametrize("cosine", [1.0, -1.0, 0.0])
def test_the_bound_holds_whatever_the_tasks_so_it_separates_nothing(cosine: float) -> None:
    for seed in range(5):
        got = figures(planted(seed, cosine, problems=12), "mean_std")
        assert 0 <= got["pairs"][0]["tightness"] <= 1
    assert got["pairs"][0]["tightness"] < 0.2  # far from tight even for identical tasks


@pytest.mark.parametrize("truth", [1.0, 0.5, -0.6])
def test_disattenuated_cosine_finds_the_planted_one_where_the_raw_one_is_too_small(truth: float) -> None:
    found = [figures(planted(seed, truth, signal=0.9), "mean")["pairs"][0] for seed in range(8)]
    known = [p["cosine"] for p in found if p["cosine"] is not None]
    assert len(known) >= 6
    assert np.mean(known) == pytest.approx(truth, abs=0.15)
    assert abs(np.mean([p["raw_cosine"] for p in found])) < 0.85 * abs(truth)
    inside = [p["cosine_interval"][0] <= truth <= p["cosine_interval"][1] for p in found if p["cosine_interval"]]
    assert np.mean(inside) >= 0.7


def test_controls_agree_oppose_and_vanish_where_there_is_signal() -> None:
    got = figures(planted(3, 0.0), "mean")
    for c in got["controls"].values():
        assert c["resolved"] and not c["failed"]
        assert c["positive"]["cosine"] == pytest.approx(1, abs=0.25)
        assert c["adversarial"]["cosine"] == pytest.approx(-1, abs=0.25)
    assert "no overlap seen; the true cosine lies between" in got["pairs"][0]["reading"]
    assert "oppose" in figures(planted(3, -0.9), "mean")["pairs"][0]["reading"]
    assert "agree" in figures(planted(3, 0.9), "mean")["pairs"][0]["reading"]


def test_without_signal_nothing_is_called_orthogonal() -> None:
    said = [figures(planted(seed, 0.0, problems=10, signal=0.0), "mean")["pairs"][0] for seed in range(12)]
    assert sum("no overlap seen; the true cosine" in p["reading"] for p in said) <= 1
    assert sum("not enough data" in p["reading"] for p in said) >= 8


def test_a_failed_control_forbids_every_statement_and_is_named() -> None:
    """The answers to a problem share a direction and the baseline is not theirs: shuffling rewards then changes nothing, which
    no statement about tasks survives."""
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.normal(size=(60, 2)))[0].T
    reward = np.tile(np.repeat([1, 0], G), 40)  # whole groups right or wrong, in turn
    pull = (2 * reward - 1)[:, None] * np.repeat(shared, 40 * G, axis=0)
    s = made(rng.normal(size=(2 * 40 * G, 60)) + 2 * pull, reward, 40)
    got = figures(s, "batch")
    for c in got["controls"].values():
        assert c["resolved"] and "shuffled within groups still give an I in [+" in c["failed"]
    line = got["pairs"][0]["reading"]
    assert "no statement, a control failed" in line and "in a and " in line and "no overlap" not in line
    assert got["pairs"][0]["cosine"] is not None  # what would have been called free of overlap


def test_the_meter_reads_zero_on_policy_and_the_planted_share_off_policy() -> None:
    assert figures(planted(4, 0.0, signal=0.0), "mean")["tasks"]["a"]["off_policy"] == pytest.approx(0, abs=0.02)
    got = figures(planted(4, 0.0, signal=0.0, mean=0.5), "mean")["tasks"]["a"]
    assert got["off_policy"] == pytest.approx(0.25 / 1.25, abs=0.04)
    assert got["off_policy_interval"][0] > 0.1
    per_token = made(np.eye(2 * 5 * G), np.zeros(2 * 5 * G), 5, per_token=True)
    assert figures(per_token, "mean")["tasks"]["a"]["off_policy"] is None  # E[S / length] is not 0 on-policy either


def test_u_statistics_are_unbiased_and_plain_squares_are_not() -> None:
    rng = np.random.default_rng(0)
    u, plain = [], []
    for _ in range(2000):
        x = rng.normal(size=(6, 10)) + 0.3
        u.append(u_statistic(x @ x.T))
        plain.append(cross(x @ x.T))
    assert np.mean(u) == pytest.approx(0.9, abs=0.1)
    assert np.mean(plain) == pytest.approx(0.9 + 10 / 6, abs=0.1)


def test_copies_of_a_problem_in_a_resample_are_no_pair() -> None:
    """Without a mean, resampled U scatters around 0; counting copies would add (1/n) E|g|^2 to every one."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 50))
    w = rng.multinomial(20, np.full(20, 1 / 20), size=4000).astype(float)
    k = x @ x.T
    assert u_statistic(k, w).mean() == pytest.approx(u_statistic(k), abs=0.3)
    assert cross(k, w, w).mean() > u_statistic(k) + 1.5


def test_unsolvable_tasks_have_no_gradient_and_no_figures_that_need_one() -> None:
    s = made(np.random.default_rng(0).normal(size=(2 * 5 * G, 9)), np.zeros(2 * 5 * G), 5)
    got = figures(s, "mean_std")
    assert got["tasks"]["a"]["zero_gradient_share"] == 1 and got["tasks"]["a"]["U"] == 0
    assert got["pairs"][0]["cosine"] is None and "not enough data" in got["pairs"][0]["reading"]


def test_energy_in_main_directions_equals_the_singular_vectors_written_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(14, 30))
    _, _, vt = np.linalg.svd(x[:8], full_matrices=False)
    want = np.square(x[8:] @ vt[:4].T).sum() / np.square(x[8:]).sum()
    assert energy_in(x @ x.T, range(8), range(8, 14), 4) == pytest.approx(want)
    assert energy_in(np.zeros((14, 14)), range(8), range(8, 14), 4) is None


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_subspace_shows_although_mean_gradients_are_unrelated(shared: bool) -> None:
    """Both tasks vary strongly in four directions, the same or other ones, with mean 0 and noise in 200 dimensions."""
    rng = np.random.default_rng(1)
    q = np.linalg.qr(rng.normal(size=(200, 8)))[0]
    first, second = q[:, :4], q[:, :4] if shared else q[:, 4:]
    x = np.concatenate([6 * rng.normal(size=(40, 4)) @ d.T + rng.normal(size=(40, 200)) * 0.3 for d in (first, second)])
    found = shared_subspaces(x @ x.T, np.repeat([0, 1], 40), "ab", 200)
    one = found["pairs"][0]
    assert one["own"] > 0.8 and found["chance"] == pytest.approx(0.02)
    assert one["share"] > 0.8 if shared else one["share"] < 0.1
