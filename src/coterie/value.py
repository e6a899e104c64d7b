"""Advantages and loss of a learned value function: PPO with GAE (arXiv 1506.02438 eq. 16, arXiv 1707.06347).

``values[b, t]`` is the value of the state *before* token t (a head on the hidden state of token t - 1, the same position
that predicts token t). Only the policy's tokens are steps; whatever a helper or the context writes in between is part of
the world's answer, so the step after a policy token is the next policy token of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.external import check_shapes


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates over each row's steps.

    ``delta_t = R_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where t + 1 is the row's next step
    and both are 0 after its last one. A truncated answer is treated as ended, since its verifier's reward is final.

    Args:
        rewards: [B, T] reward received with each token; an answer's reward stands on its last step.
        values: [B, T], no gradient is taken.
        mask: [B, T] bool, the steps: tokens the policy wrote.

    Returns:
        advantages and returns (``A + V``, the regression target), [B, T], 0 outside ``mask``.
    """
    check_shapes(rewards=rewards, values=values, mask=mask)
    v = values.detach()  # [B, T]
    advantages = torch.zeros_like(v)  # [B, T]
    next_value = torch.zeros_like(v[:, 0])  # [B]
    next_advantage = torch.zeros_like(next_value)  # [B]
    for t in range(v.shape[1] - 1, -1, -1):
        step = mask[:, t]  # [B]
        delta = rewards[:, t] + gamma * next_value - v[:, t]  # [B]
        advantage = delta + gamma * lam * next_advantage  # [B]
        advantages[:, t] = torch.where(step, advantage, torch.zeros_like(advantage))  # [B]
        next_advantage = torch.where(step, advantage, next_advantage)  # [B]
        next_value = torch.where(step, v[:, t], next_value)  # [B]
    returns = torch.where(mask, advantages + v, torch.zeros_like(v))  # [B, T]
    return advantages, returns


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weight: Tensor, clip: float) -> Tensor:
    """``sum_t w_t max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2``, a scalar.

    The larger of the two errors, so that clipping never hides one (as in OpenAI's PPO code; not in the paper).

    Args:
        values: [B, T], differentiable.
        old_values: [B, T] at the start of the update.
        weight: [B, T] weight of each step, 0 elsewhere; from ``losses.token_weights``, so that micro-batches sum.
    """
    check_shapes(values=values, old_values=old_values, returns=returns, weight=weight)
    old = old_values.detach()  # [B, T]
    near = old + (values - old).clamp(-clip, clip)  # [B, T]
    error = torch.maximum((values - returns).square(), (near - returns).square()) / 2  # [B, T]
    return torch.where(weight > 0, error * weight, torch.zeros_like(error)).sum()  # scalar
