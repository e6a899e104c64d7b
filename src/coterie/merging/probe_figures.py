"""What inner products of scores say about tasks: sizes, interference and what the sample can resolve. Pure functions.

For a group of G answers with scores ``S_k`` and advantages ``A_k``: residual ``dS_k = S_k - mean S``; group gradient
``g = (1/G) sum_k A_k S_k``, equal to ``(1/G) sum_k A_k dS_k`` wherever the advantages sum to 0. For tasks i and j:

- ``V_i^2``: mean over groups of ``(1/G) sum_k |dS_k|^2`` (a mean over the group: no further 1/G in ``|I| <= V_i V_j``);
- ``I_ij = <E g_i, E g_j>``: mean of ``<g_p, g_q>`` over problems p of i, q of j. Unbiased: the samples are independent;
- ``U_ii = |E g_i|^2``: the same over *distinct* problems of one task (a U-statistic). The plain square of the mean gradient
  is larger by its noise, which makes raw cosines look orthogonal whatever the truth;
- disattenuated cosine ``I_ij / sqrt(U_ii U_jj)``, unresolved where the interval of a U reaches 0.

Intervals: bootstrap over problems (the answers to one problem are not independent), 95%; products of a problem with its own
copy are left out. Under a true 0 they are wider than needed, never narrower.

The bound ``|I| <= V_i V_j`` (with advantages of deviation 1) is a theorem: it holds for identical and for opposed tasks,
so it cannot show that tasks do not interfere. ``tightness = |I| / (V_i V_j)`` is information only.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.advantages import group_advantages
from coterie.merging.compatibility import Evidence, decide, overlap_of
from coterie.merging.probe import Scores
from coterie.merging.probe_subspace import shared_subspaces
from coterie.types import Group, Problem, StopReason, Trajectory

RESAMPLES = 1000
RESOLVED = 0.95  # share of resamples in which both U must be positive for a disattenuated cosine

Array = NDArray[np.float64]


def figures(scores: Scores, kind: str = "mean", seed: int = 0) -> dict[str, Any]:
    """All figures of a probe; ``kind`` is the advantage estimator (``mean``, ``mean_std``, ``rloo``, ``batch``). JSON types."""
    rng = np.random.default_rng(seed)
    adv = advantages(scores, scores.reward, kind)
    real = _Groups(scores, adv)
    shuffled = _Groups(scores, advantages(scores, _shuffled(scores, rng), kind))
    negated = _Groups(scores, advantages(scores, 1 - scores.reward, kind))
    draws = {i: _draws(rng, len(real.of(i))) for i in range(len(scores.tasks))}
    tasks = {name: _task(scores, real, adv, i, draws[i]) for i, name in enumerate(scores.tasks)}
    controls = {name: _controls(real, shuffled, negated, i, rng) for i, name in enumerate(scores.tasks)}
    pairs = [_pair(scores, real, tasks, i, j, draws) for i, j in combinations(range(len(scores.tasks)), 2)]
    for pair in pairs:
        pair["reading"] = _reading(pair, controls, scores.floor)
        names = (pair["tasks"][0], pair["tasks"][1])
        pair["verdict"] = decide(Evidence(names, overlap=overlap_of(pair, controls))).to_json(names)
    return {
        "tasks": tasks,
        "controls": controls,
        "pairs": pairs,
        "subspaces": shared_subspaces(real.gram, real.task, scores.tasks, scores.values),
        "map": principal_map(real.gram, real.task),
        "score_map": principal_map(scores.gram, scores.task),
        "floor_of_the_sketch": scores.floor,
        "values_in_a_score": scores.values,
        "advantage": kind,
    }


def advantages(scores: Scores, rewards: Array, kind: str) -> Array:
    """[N] by the trainer's own code, group by group (``batch``: one pool per task); 0 where there is none."""
    out = np.zeros(len(rewards))
    for i in range(len(scores.tasks)):
        at = [np.flatnonzero(scores.group == g) for g in np.unique(scores.group[scores.task == i])]
        groups = [
            Group(str(n), Problem("", "", ""), "", 0, "", tuple(_bare(rewards[k]) for k in ks))
            for n, ks in enumerate(at)
        ]
        for ks, values in zip(at, group_advantages(groups, kind), strict=True):
            out[ks] = [0.0 if a is None else a for a in values]
    return out


def _bare(reward: float) -> Trajectory:
    empty = np.zeros(0)
    given = None if np.isnan(reward) else float(reward)
    return Trajectory(
        empty.astype(np.int32), empty.astype(np.uint8), empty.astype(np.float32), 0, (), StopReason.EOS, reward=given
    )


class _Groups:
    """Group gradients as inner products: ``gram[p, q] = <g_p, g_q>``."""

    def __init__(self, scores: Scores, adv: Array) -> None:
        ids = np.unique(scores.group)  # [P]
        self.weights = np.zeros((len(ids), len(adv)))  # [P, N]
        for p, g in enumerate(ids):
            at = scores.group == g
            self.weights[p, at] = adv[at] / at.sum()
        self.task = np.array([scores.task[scores.group == g][0] for g in ids])  # [P]
        self.scores = scores.gram
        self.gram: Array = self.weights @ scores.gram @ self.weights.T  # [P, P]

    def of(self, task: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.task == task)

    def against(self, other: _Groups) -> Array:
        """[P, P] inner products with group gradients made from other advantages."""
        out: Array = self.weights @ self.scores @ other.weights.T
        return out


def _draws(rng: np.random.Generator, n: int) -> Array:
    """[R, n] how often each problem is drawn in each resample."""
    return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64) if n else np.zeros((RESAMPLES, 0))


def cross(k: Array, wi: Array | None = None, wj: Array | None = None) -> Any:
    """Mean of ``k [n, m]`` over all pairs; [R] under draws."""
    if wi is None or wj is None:
        return float(k.mean())
    return np.einsum("rn,nm,rm->r", wi, k, wj, optimize=True) / (k.shape[0] * k.shape[1])


def u_statistic(k: Array, w: Array | None = None) -> Any:
    """Mean of ``k [n, n]`` over pairs of distinct problems; [R] under draws (copies of one problem are no pair)."""
    off = k - np.diag(np.diag(k))
    n = len(k)
    if w is None:
        return float(off.sum() / (n * (n - 1)))
    pairs = w.sum(1) ** 2 - (w**2).sum(1)  # [R]
    return np.einsum("rn,nm,rm->r", w, off, w, optimize=True) / np.maximum(pairs, 1)


def _interval(draws: Array) -> list[float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return [float(low), float(high)]


def _task(scores: Scores, real: _Groups, adv: Array, i: int, w: Array) -> dict[str, Any]:
    at = np.flatnonzero(scores.task == i)
    ids = np.unique(scores.group[at])
    blocks = [scores.gram[np.ix_(ks, ks)] for ks in (np.flatnonzero(scores.group == g) for g in ids)]
    size = np.array([len(b) for b in blocks], float)  # [n]
    s2 = np.array([np.trace(b) for b in blocks]) / size  # [n] mean |S|^2
    mean2 = np.array([b.sum() for b in blocks]) / size**2  # [n] |mean S|^2
    v2 = s2 - mean2  # [n] mean |dS|^2
    pairs = (np.array([b.sum() for b in blocks]) - size * s2) / np.maximum(size * (size - 1), 1)  # [n]
    k = real.gram[np.ix_(real.of(i), real.of(i))]
    sums = np.array([adv[scores.group == g].sum() for g in ids])
    leak2 = np.mean(sums**2 * mean2 / size**2)
    g2 = float(np.mean(np.diag(k)))
    u = u_statistic(k)
    ok = scores.settings.per_token is False
    eta = w @ pairs / np.maximum(w @ s2, 1e-300)
    return {
        "problems": len(ids),
        "answers": len(at),
        "solve_rate": float(np.nanmean(scores.reward[at])) if np.isfinite(scores.reward[at]).any() else None,
        "mean_length": float(scores.length[at].mean()),
        "entropy": float(scores.entropy[at].mean()),
        "concentration": float(scores.concentration[at].mean()),
        "distinct": float(scores.distinct[i]),
        "zero_gradient_share": float(np.mean(np.diag(k) == 0)),
        "S": float(np.sqrt(s2.mean())),
        "mean_S": float(np.sqrt(mean2.mean())),
        "V": float(np.sqrt(v2.mean())),
        "M": scores.reference_norm[i],
        "group_gradient": g2**0.5,
        "U": u,
        "U_interval": _interval(u_statistic(k, w)),
        "signal_share": u / float(k.mean()) if k.mean() > 0 else None,
        "zero_sum_leak": float(np.sqrt(leak2 / g2)) if g2 else None,
        "off_policy": float(pairs.mean() / s2.mean()) if ok and s2.mean() else None,
        "off_policy_interval": _interval(eta) if ok else None,
    }


def _pair(
    scores: Scores, real: _Groups, tasks: dict[str, Any], i: int, j: int, draws: dict[int, Array]
) -> dict[str, Any]:
    a, b = real.of(i), real.of(j)
    found = _cosine(real.gram, real.gram, a, b, draws[i], draws[j])
    name_i, name_j = scores.tasks[i], scores.tasks[j]
    limit = tasks[name_i]["V"] * tasks[name_j]["V"]
    return {
        "tasks": [name_i, name_j],
        **found,
        "tightness": abs(found["I"]) / limit if limit else None,
    }


def _cosine(k: Array, between: Array, a: Any, b: Any, wa: Array, wb: Array) -> dict[str, Any]:
    """I with its interval, the raw and the disattenuated cosine. ``between``: products of the two sides' gradients."""
    across = between[np.ix_(a, b)]
    ka, kb = k[np.ix_(a, a)], k[np.ix_(b, b)]
    value, ua, ub = cross(across), u_statistic(ka), u_statistic(kb)
    many, ma, mb = cross(across, wa, wb), u_statistic(ka, wa), u_statistic(kb, wb)
    plain = float(ka.mean() * kb.mean())
    usable = (ma > 0) & (mb > 0)
    resolved = ua > 0 and ub > 0 and _interval(ma)[0] > 0 and _interval(mb)[0] > 0 and usable.mean() >= RESOLVED
    return {
        "I": value,
        "I_interval": _interval(many),
        "raw_cosine": value / plain**0.5 if plain > 0 else None,
        "cosine": value / (ua * ub) ** 0.5 if resolved else None,
        "cosine_interval": _interval(many[usable] / np.sqrt(ma[usable] * mb[usable])) if resolved else None,
    }


def _controls(real: _Groups, shuffled: _Groups, negated: _Groups, i: int, rng: np.random.Generator) -> dict[str, Any]:
    """One task in two halves: against itself (true cosine 1), against itself with rewards negated (-1), and against itself
    with rewards shuffled within every group (0). ``failed``: what the last two show that cannot be, else empty."""
    at = real.of(i)
    a, b = at[::2], at[1::2]
    wa, wb = _draws(rng, len(a)), _draws(rng, len(b))
    same = _cosine(real.gram, real.gram, a, b, wa, wb)
    opposite = _cosine(real.gram, real.against(negated), a, b, wa, wb)
    nothing = _cosine(real.gram, real.against(shuffled), a, b, wa, wb)
    low, high = nothing["I_interval"]
    failed = ""
    if not low <= 0 <= high:
        failed = f"rewards shuffled within groups still give an I in [{low:+.1e}, {high:+.1e}]"
    elif opposite["I_interval"][0] > 0:
        failed = "rewards negated still give an I above 0"
    return {
        "positive": same,
        "adversarial": opposite,
        "negative": {"I": nothing["I"], "I_interval": nothing["I_interval"]},
        "resolved": same["I_interval"][0] > 0,
        "failed": failed,
    }


def _shuffled(scores: Scores, rng: np.random.Generator) -> Array:
    out = scores.reward.copy()
    for g in np.unique(scores.group):
        at = np.flatnonzero(scores.group == g)
        out[at] = rng.permutation(out[at])
    return out


def _reading(pair: dict[str, Any], controls: dict[str, Any], floor: float) -> str:
    """One sentence. Nothing is said where a control failed, and nothing is called orthogonal where the same task is not seen
    to agree with itself."""
    names = " and ".join(pair["tasks"])
    low, high = pair["I_interval"]
    blind = [t for t in pair["tasks"] if not controls[t]["resolved"]]
    failed = [f"{controls[t]['failed']} in {t}" for t in pair["tasks"] if controls[t]["failed"]]
    if failed:
        return f"{names}: no statement, a control failed: {' and '.join(failed)}"
    if low > 0:
        return f"{names}: their gradients agree (interval of I above 0)"
    if high < 0:
        return f"{names}: their gradients oppose each other (interval of I below 0)"
    if blind:
        return f"{names}: not enough data: not even problems of {' or of '.join(blind)} agree with each other"
    if pair["cosine_interval"] is None:
        return f"{names}: no overlap seen, but its size cannot be bounded with this sample; ask for more problems"
    least, most = pair["cosine_interval"]
    seen = f", and the sketch resolves raw cosines above {floor:.0e}" if floor else ""
    return f"{names}: no overlap seen; the true cosine lies between {least:+.2f} and {most:+.2f}{seen}"


def principal_map(k: Array, task: NDArray[np.int64]) -> dict[str, Any]:
    """Vectors in the plane of their two main directions (from their inner products ``k [n, n]``), for a picture."""
    middle = k - k.mean(0) - k.mean(1)[:, None] + k.mean()
    values, vectors = np.linalg.eigh(middle)
    top = np.argsort(values)[::-1][:2]
    spread = np.maximum(values[top], 0)
    points = vectors[:, top] * np.sqrt(spread)
    total = float(np.maximum(values, 0).sum())
    return {
        "task": task.tolist(),
        "points": points.tolist(),
        "share": [float(s / total) if total else 0.0 for s in spread],
    }
