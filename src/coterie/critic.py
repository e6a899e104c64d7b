"""PPO's second half, between the loop and the formulas of :mod:`coterie.value`: values, advantages and the critic's loss.

The order of a step: rewards are laid out as a batch (:func:`plain_rewards`), the value head reads it
(:func:`start_values`), and :func:`with_gae` replaces the rewards by advantages per token and adds the returns that the head
then learns from (:func:`critic_loss`), in the same backward pass as the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.advantages import EPS, usable_reward
from coterie.batching import Batch, micro_batches
from coterie.config import AdvantageConfig, Config
from coterie.forward import TokenStats
from coterie.loss_metrics import LossOutput
from coterie.losses import provenance, token_weights
from coterie.types import Group
from coterie.value import gae, value_loss

if TYPE_CHECKING:
    from coterie.policy import Policy


def plain_rewards(groups: Sequence[Group]) -> list[list[float | None]]:
    """Rewards in the place of advantages; None (no row) where a trajectory has no usable one."""
    return [[usable_reward(t) for t in g.trajectories] for g in groups]


@torch.no_grad()
def start_values(policy: Policy, batch: Batch, token_budget: int) -> Tensor:
    """[B, T] values before the update, on the CPU."""
    out = torch.zeros(batch.input_ids.shape)  # [B, T]
    first = 0
    for part in micro_batches(batch, token_budget):
        values = policy.logprobs(part).values  # [b, t]
        assert values is not None
        out[first : first + len(part), : values.shape[1]] = values.cpu()
        first += len(part)
    return out


def with_gae(batch: Batch, values: Tensor, cfg: AdvantageConfig) -> Batch:
    """The batch with advantages per token and returns, from rewards laid out as advantages.

    A row's reward is received with the last token the policy wrote in it. With ``cfg.whiten`` the advantages (not the
    returns) get mean 0 and deviation 1 over all policy tokens of the whole batch.

    Args:
        values: [B, T] at the start of the update.
    """
    assert batch.advantages is not None
    if batch.trained == 0:
        return replace(batch, returns=torch.zeros_like(batch.advantages))
    who = provenance(batch)
    steps = who.own | who.peer  # [B, T]
    last = steps & (steps.flip(1).cumsum(1).flip(1) == 1)  # [B, T] the row's last step
    rewards = torch.where(last, batch.advantages, torch.zeros_like(values))  # [B, T]
    advantages, returns = gae(rewards, values, steps, cfg.gamma, cfg.lam)  # [B, T] each
    if cfg.whiten:
        spread = advantages[steps]  # [M]
        white = (advantages - spread.mean()) / (spread.std(correction=0) + EPS)  # [B, T]
        advantages = torch.where(steps, white, torch.zeros_like(white))  # [B, T]
    return replace(batch, advantages=advantages, returns=returns)


def critic_loss(stats: TokenStats, at_start: TokenStats, batch: Batch, cfg: Config) -> LossOutput:
    """``value_coef`` times the value head's regression on the own policy's tokens, weighed like the policy's loss.

    Peers' rewards say what *their* policy reaches from a state, so they move advantages but not the head. Additive over
    micro-batches, as are ``sums`` (see :func:`critic_metrics`).
    """
    assert stats.values is not None and at_start.values is not None and batch.returns is not None
    batch = batch.to(stats.values.device)
    assert batch.returns is not None
    who, n = provenance(batch), batch.normalizers
    weight = token_weights(who.own | who.peer, cfg.loss.normalization, n.policy, n.rows, n.max_new_tokens)  # [B, T]
    weight = torch.where(who.own, weight * batch.weights[:, None], torch.zeros_like(weight))  # [B, T]
    raw = value_loss(stats.values, at_start.values, batch.returns, weight, cfg.advantage.value_clip)  # scalar
    r, v = batch.returns[who.own].double(), stats.values.detach()[who.own].double()  # [M]
    sums = {"n": who.own.sum(), "loss": raw.detach(), "v": v.sum(), "r": r.sum(), "rr": (r * r).sum()}
    sums |= {"e": (r - v).sum(), "ee": (r - v).square().sum()}
    moved = (stats.values.detach() - at_start.values).abs() > cfg.advantage.value_clip  # [B, T]
    return LossOutput(cfg.advantage.value_coef * raw, sums | {"clipped": (moved & who.own).sum()})


def critic_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Metrics of the value head from the outputs of all micro-batches; nothing where there is no head or no own token."""
    total: dict[str, float] = {}
    for output in outputs:
        for key, value in output.sums.items():
            total[key] = total.get(key, 0.0) + float(value)
    n = total.get("n", 0.0)
    if not n:
        return {}
    out = {
        "value/loss": total["loss"],
        "value/mean": total["v"] / n,
        "value/return": total["r"] / n,
        "value/clipped": total["clipped"] / n,
    }
    spread = total["rr"] / n - (total["r"] / n) ** 2
    if spread > EPS:  # all returns equal: there is nothing to explain
        out["value/explained"] = 1 - (total["ee"] / n - (total["e"] / n) ** 2) / spread
    return {k: v for k, v in out.items() if math.isfinite(v)}
