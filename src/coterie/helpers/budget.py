"""How much help a trajectory may use, and how much room stays for the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.config import HelpersConfig
from coterie.errors import UserError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one trajectory; token counts are tokens of the policy's tokenizer."""

    response: int  # whole response, replies and notes included
    per_role: Mapping[str, int]
    total: int
    query: int
    cost: int  # most tokens that one question adds: reply and wrappers, or the note that there is no reply
    reserve: int  # kept for the policy after the last reply; at least 1
    notes: int  # error notes before the next bad question ends the rollout

    def __post_init__(self) -> None:
        need = self.cost + self.reserve
        if self.per_role and need >= self.response:
            raise UserError(
                f"helpers: no question could ever be served: a reply takes up to {self.cost} tokens and {self.reserve} are "
                f"reserved, but rollout.max_new_tokens is {self.response}; lower helpers.feedback_tokens or "
                f"helpers.reserve, or raise rollout.max_new_tokens above {need}"
            )

    def allows(self, role: str, used: Mapping[str, int], room: int) -> bool:
        """Whether a question to ``role`` may be served with ``room`` response tokens left."""
        within = used.get(role, 0) < self.per_role[role] and sum(used.values()) < self.total
        return within and room - self.cost >= self.reserve


def make_budget(cfg: HelpersConfig, response: int, wrappers: int, note: int) -> Budget:
    """Budget of a run. ``wrappers``: tokens around a reply; ``note``: tokens of the longest note instead of one.

    The reserve is rounded up, so that the promised share is always left.
    """
    limits = {role: h.limit for role, h in cfg.roles.items()}
    reserve = max(1, math.ceil(cfg.reserve * response))
    cost = max(wrappers + cfg.feedback_tokens, note)
    return Budget(response, limits, cfg.total_limit, cfg.query_tokens, cost, reserve, cfg.notes_limit)
