"""Advantages: how much better each trajectory did than what it is compared with.

Pure functions over rewards, computed once per trajectory, in float64, group by group (whole groups
are passed, so position in the batch never matters). A trajectory without a usable reward (failed, None, NaN, infinite)
gets ``None``, *not assigned*, and is left out of every mean and deviation. A usable reward with nothing to compare it
with (alone in its pool) gets 0. Results are always finite.

With a pool of ``n`` usable rewards ``r``, mean ``m`` and sample standard deviation ``s`` (ddof 1):

=========== ============================== ======================================================================
kind        advantage                      source
=========== ============================== ======================================================================
mean_std    (r_i - m) / (s + 1e-6)         GRPO, arXiv 2402.03300 (which leaves ddof open; 1 as in common trainers)
mean        r_i - m                        Dr. GRPO, arXiv 2503.20783
rloo        r_i - mean(r without r_i)      RLOO, arXiv 2402.14740; equals n/(n-1) (r_i - m)
batch       mean_std, pool = whole batch   REINFORCE++, arXiv 2501.03262: one mean and deviation over all trajectories
                                           of the batch, each counted once; no group baseline
=========== ============================== ======================================================================

``rloo`` is never divided by a deviation: leave-one-out baselines with a leave-one-out deviation give unbounded values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from coterie.errors import UserError
from coterie.types import Group, Trajectory

Kind = Literal["mean_std", "mean", "rloo", "batch"]
Baseline = Literal["own_mode", "solo_mean", "shared"]
KINDS = ("mean_std", "mean", "rloo", "batch")
BASELINES = ("own_mode", "solo_mean", "shared")
EPS = 1e-6  # keeps rounding noise between equal rewards from being scaled up to an advantage of order one


def group_advantages(
    groups: Sequence[Group], kind: str = "mean_std", baseline: str = "own_mode"
) -> list[list[float | None]]:
    """Advantages of every trajectory, aligned with ``groups[i].trajectories``.

    ``baseline`` says what a trajectory is compared with when a group mixes helped and solo rollouts: ``own_mode`` (its
    own mode only), ``solo_mean`` (everyone with the solo mean, so that help itself is credited), ``shared`` (one mean
    for all). With one mode present all three agree. Under the last two, ``mean_std`` divides by the deviation of the
    whole pool, which bounds the result even where all solo rewards are equal.

    Raises:
        UserError: unknown kind or baseline (``rloo`` with a deviation among them).
    """
    if kind not in KINDS:
        raise UserError(
            f"advantage kind {kind!r}: use one of {', '.join(KINDS)} (rloo is never divided by a deviation)"
        )
    if baseline not in BASELINES:
        raise UserError(f"advantage baseline {baseline!r}: use one of {', '.join(BASELINES)}")
    pools = [[t for g in groups for t in g.trajectories]] if kind == "batch" else [list(g.trajectories) for g in groups]
    flat = iter([a for pool in pools for a in _pool(pool, "mean_std" if kind == "batch" else kind, baseline)])
    return [[next(flat) for _ in g.trajectories] for g in groups]


def usable_reward(trajectory: Trajectory) -> float | None:
    """The reward if it may enter a baseline: verified, finite, and not an infrastructure failure."""
    r = trajectory.reward
    return r if r is not None and math.isfinite(r) and trajectory.failed is None else None


def expected_informative_share(p: float, group_size: int) -> float:
    """Chance that a group of ``G`` right/wrong answers at pass rate ``p`` has both: ``1 - (p^G + (1 - p)^G)``."""
    if not (0 <= p <= 1 and group_size >= 1):
        raise ValueError(f"need 0 <= p <= 1 and group_size >= 1, got p={p}, group_size={group_size}")
    return 1.0 - (p**group_size + (1.0 - p) ** group_size)


def _pool(pool: Sequence[Trajectory], kind: str, baseline: str) -> list[float | None]:
    rewards = [usable_reward(t) for t in pool]
    everyone = [r for r in rewards if r is not None]
    by_mode: dict[str, list[float]] = {}
    for t, r in zip(pool, rewards, strict=True):
        if r is not None:
            by_mode.setdefault(t.mode, []).append(r)
    out: list[float | None] = []
    for t, r in zip(pool, rewards, strict=True):
        if r is None:
            out.append(None)
        elif baseline == "own_mode":
            out.append(_advantage(r, by_mode[t.mode], by_mode[t.mode], kind, member=True))
        elif baseline == "shared":
            out.append(_advantage(r, everyone, everyone, kind, member=True))
        else:
            out.append(_advantage(r, by_mode.get("solo", []), everyone, kind, member=t.mode == "solo"))
    return out


def _advantage(r: float, compared: list[float], spread: list[float], kind: str, *, member: bool) -> float:
    """Advantage of ``r`` against ``compared`` (which holds it if ``member``), scaled by the deviation of ``spread``."""
    n = len(compared)
    if n == 0 or (member and n == 1):
        return 0.0
    centred = r - _mean(compared)
    if kind == "rloo" and member:
        return centred * n / (n - 1)
    return centred / (_deviation(spread) + EPS) if kind == "mean_std" else centred


def _mean(values: list[float]) -> float:
    """Mean, exact when all values are equal (rounding would turn "no signal" into a tiny one)."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: list[float]) -> float:
    """Sample standard deviation (ddof 1); needs at least two values."""
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
