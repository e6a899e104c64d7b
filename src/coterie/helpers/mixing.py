"""How a group is made up of helped and solo trajectories, and the guards around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.config import HelpersConfig
from coterie.types import Group, Trajectory


def solo_share(cfg: HelpersConfig, step: int) -> float:
    """Share of solo trajectories at ``step``: linear from ``solo_start`` to ``solo_end`` over ``solo_steps``, then flat."""
    done = min(1.0, step / cfg.solo_steps)
    return cfg.solo_start + (cfg.solo_end - cfg.solo_start) * done


def solo_count(cfg: HelpersConfig, group_size: int, step: int) -> int:
    """How many of ``group_size`` trajectories are rolled out under the plain prompt; the rest may ask helpers.

    Without roles all are. At least ``solo_min`` are: a mode that is used after training has to be trained on-policy, and
    its own baseline needs two. Halves round up.
    """
    if not cfg.roles:
        return group_size
    return min(group_size, max(cfg.solo_min, int(solo_share(cfg, step) * group_size + 0.5)))


def too_many_failed(trajectories: Sequence[Trajectory], max_failed: float) -> bool:
    """Whether a larger share than ``max_failed`` of the helped trajectories was lost to helper failures."""
    helped = [t for t in trajectories if t.mode == "helped"]
    return bool(helped) and sum(t.failed is not None for t in helped) > max_failed * len(helped)


@dataclass
class CollapseGuard:
    """Notices that the policy has stopped asking (ASTER, arXiv 2602.01204, calls it interaction collapse)."""

    patience: int
    quiet: int = 0  # steps in a row without a consultation

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics ``helpers/quiet_steps`` and ``helpers/collapsed`` (0 or 1). A step without helped rollouts says nothing."""
        helped = [t for g in groups for t in g.trajectories if t.mode == "helped"]
        if helped:
            asked = any(c.outcome in ("ok", "failed", "limit") for t in helped for c in t.consults)
            self.quiet = 0 if asked else self.quiet + 1
        return {"helpers/quiet_steps": float(self.quiet), "helpers/collapsed": float(self.quiet >= self.patience)}
