"""The policy loss: one formula per token, chosen by who wrote it.

``loss = sum_t w_t l_t``, over the tokens of ``loss_mask``, where ``w_t`` comes from the normalisers of the whole batch
(so the losses of its micro-batches sum to the loss of the whole) and ``l_t`` from the token's provenance:

- *own*: written by this node's policy. ``clip`` or ``gspo``, plus the KL term;
- *peer*: written by another node's policy. ``peer_loss``;
- *helper*: written by a helper, in whoever's trajectory. ``external_loss``.

The denominator of ``w`` counts policy tokens (own and peer) only, so that switching the treatment of other tokens
leaves the step size of own tokens unchanged; ``ce`` has its own denominator. Derivations: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.config import LossConfig
from coterie.external import (
    Provenance,
    Tokens,
    aipo_coefficient,
    check_shapes,
    clipped_loss,
    luffy_loss,
    positive_coefficient,
    ppo_is_loss,
    recorded,
    tapered_coefficient,
    truncated_coefficient,
    whole_replies,
)
from coterie.loss_metrics import LossOutput, diagnostics
from coterie.types import Source

K3_LINEAR_ABOVE = 10.0  # log(ref / policy) beyond which k3 goes on as a straight line


class Stats(Protocol):
    """What the policy reports per token (``Policy.logprobs``), all [B, T]."""

    @property
    def logprobs(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor | None: ...
    @property
    def sum_sq(self) -> Tensor | None: ...


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean of the log ratio over each row's ``mask``, at every token: GSPO, arXiv 2507.18071.

    The length-normalised form: a constant difference per token gives the same ratio at any length. Rows without a
    masked token get 0.
    """
    check_shapes(log_ratio=log_ratio, mask=mask)
    count = mask.sum(1, keepdim=True).clamp(min=1)  # [B, 1]
    mean = (log_ratio * mask).sum(1, keepdim=True) / count  # [B, 1]
    return mean.expand_as(log_ratio)  # [B, T]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """KL between policy and start model per token, from tokens the policy sampled (Schulman 2020,
    http://joschu.net/blog/kl-approx.html). With ``d = log(ref / policy)``:

    - ``k3 = exp(d) - 1 - d``: unbiased for KL(policy || ref) as a *value*; as a loss its mean gradient is that of
      KL(ref || policy);
    - ``k2 = d^2 / 2``: a biased value; as a loss its mean gradient is exactly that of KL(policy || ref).

    Above ``d = 10`` k3 continues as its tangent, which stays finite and keeps pulling towards the start model.
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = ref_logprobs.detach() - logprobs  # [B, T]
    if estimator == "k2":
        return d.square() / 2  # [B, T]
    near = d.clamp(max=K3_LINEAR_ABOVE)  # [B, T]
    return near.exp() * (1 + d - near) - 1 - d  # [B, T]


def token_weights(
    policy_mask: Tensor,
    normalization: str,
    policy_tokens: int,
    rows: int,
    max_new_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of every token of a row, [B, T] (the caller masks).

    - ``token``: ``1 / N``, N policy tokens of the whole batch (DAPO, arXiv 2503.14476);
    - ``sequence``: ``1 / (R n_b)``, R rows of the whole batch, n_b policy tokens of row b (GRPO, arXiv 2402.03300);
    - ``constant``: ``1 / (R L)``, L the response budget (Dr. GRPO, arXiv 2503.20783).

    Counts below 1 are taken as 1, so a batch without policy tokens has a finite loss.
    """
    if policy_mask.dim() != 2:
        raise ValueError(f"policy_mask must be [B, T], got {tuple(policy_mask.shape)}")
    per_row = policy_mask.sum(1, keepdim=True).clamp(min=1).to(dtype)  # [B, 1]
    if normalization == "token":
        weight = torch.ones_like(per_row) / max(policy_tokens, 1)  # [B, 1]
    elif normalization == "sequence":
        weight = 1.0 / (per_row * max(rows, 1))  # [B, 1]
    elif normalization == "constant":
        if max_new_tokens < 1:
            raise ValueError("normalization = constant needs the response budget (collate(..., max_new_tokens=...))")
        weight = torch.ones_like(per_row) / (max(rows, 1) * max_new_tokens)  # [B, 1]
    else:
        raise ValueError(f"unknown normalization {normalization!r}: token, sequence or constant")
    return weight.expand(policy_mask.shape)  # [B, T]


def _clipped(t: Tokens, cfg: LossConfig, coefficient: Tensor) -> Tensor:
    return coefficient * clipped_loss(t.log_ratio, t.advantages, cfg.clip_low, cfg.clip_high)  # [B, T]


def _aipo(t: Tokens, cfg: LossConfig) -> Tensor:
    c = aipo_coefficient(t.old, t.mu, t.advantages, cfg.c_min, cfg.c_max, cfg.external_negative)  # [B, T]
    return c * clipped_loss(t.log_ratio, t.advantages, cfg.ext_clip_low, cfg.ext_clip_high)  # [B, T]


TOKEN_LOSSES: dict[str, Callable[[Tokens, LossConfig], Tensor]] = {
    "masked": lambda t, cfg: torch.zeros_like(t.logprobs),
    "surrogate": lambda t, cfg: _clipped(t, cfg, torch.ones_like(t.advantages)),
    "positive": lambda t, cfg: _clipped(t, cfg, positive_coefficient(t.advantages)),
    "tapered": lambda t, cfg: _clipped(t, cfg, tapered_coefficient(t.advantages, t.old)),
    "truncated_is": lambda t, cfg: _clipped(t, cfg, truncated_coefficient(t.old, t.mu, t.known, cfg.c_max)),
    "aipo": _aipo,
    "ppo_is": lambda t, cfg: ppo_is_loss(
        t.logprobs, t.mu, t.known, t.advantages, cfg.clip_low, cfg.clip_high, cfg.dual_clip
    ),
    "luffy": lambda t, cfg: luffy_loss(t.logprobs, t.advantages, cfg.luffy_gamma),
    "ce": lambda t, cfg: -cfg.ce_coef * t.logprobs,
}


def provenance(batch: Batch) -> Provenance:
    """Masks [B, T] of trained tokens by who wrote them: own policy, a peer's policy, a helper."""
    policy = batch.loss_mask & (batch.source == Source.POLICY)  # [B, T]
    own = batch.own[:, None]  # [B, 1]
    return Provenance(policy & own, policy & ~own, batch.loss_mask & (batch.source == Source.HELPER))


def zero_advantages_are_silent(cfg: LossConfig) -> bool:
    """Whether a row whose advantages are all 0 adds nothing to the gradient, so that it need not be computed.

    False with a KL term (it acts on all own tokens, whatever their advantage) and with ``ce`` (likewise).
    """
    return cfg.kl_coef == 0 and "ce" not in (cfg.external_loss, cfg.peer_loss)


def policy_loss(
    stats: Stats,
    batch: Batch,
    cfg: LossConfig,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
) -> LossOutput:
    """Loss of a batch or of one micro-batch of it.

    Args:
        stats: log-probs of the current policy (differentiable); entropy and sum_sq where available.
        old_logprobs: [B, T] of the policy at the start of the update; kept over all updates on the batch.
        ref_logprobs: [B, T] of the start model; needed if ``cfg.kl_coef > 0``.

    Returns:
        LossOutput: ``loss`` is additive over micro-batches, and so are ``sums``; ``loss_metrics`` turns those of all
        micro-batches into metrics.

    Raises:
        ValueError: shapes differ, no advantages, or no ``ref_logprobs`` where they are needed.
    """
    if batch.advantages is None:
        raise ValueError("policy_loss needs advantages; this batch was collated without")
    check_shapes(logprobs=stats.logprobs, old_logprobs=old_logprobs, input_ids=batch.input_ids)
    batch = batch.to(stats.logprobs.device)
    logprobs, old = _where_trained(stats.logprobs, batch), _where_trained(old_logprobs, batch).detach()  # [B, T]
    who = provenance(batch)
    tokens = _tokens(logprobs, old, batch, cfg, who)
    n = batch.normalizers
    weight = token_weights(who.own | who.peer, cfg.normalization, n.policy, n.rows, n.max_new_tokens, logprobs.dtype)
    row = batch.weights[:, None]  # [B, 1]
    weight = weight * row  # [B, T]
    terms = [
        _summed(TOKEN_LOSSES["surrogate"](tokens, cfg), weight, who.own),
        _summed(TOKEN_LOSSES[cfg.peer_loss](tokens, cfg), _or_ce(weight, row, cfg.peer_loss, n.peer_policy), who.peer),
        cfg.lambda_ext
        * _summed(
            TOKEN_LOSSES[cfg.external_loss](tokens, cfg), _or_ce(weight, row, cfg.external_loss, n.helper), who.helper
        ),
    ]
    loss = torch.stack(terms).sum()
    sums = diagnostics(loss, tokens, batch, who, weight, cfg, stats.entropy, stats.sum_sq)
    if cfg.kl_coef > 0:
        if ref_logprobs is None:
            raise ValueError("kl_coef > 0 needs ref_logprobs")
        ref = _where_trained(ref_logprobs, batch).detach()  # [B, T]
        kl = kl_estimate(logprobs, ref, cfg.kl_estimator)  # [B, T]
        kl = torch.where(who.own, kl, torch.zeros_like(kl))  # [B, T]
        loss = loss + cfg.kl_coef * (kl * weight).sum()
        far = (ref - logprobs > K3_LINEAR_ABOVE) & who.own  # [B, T]
        sums |= {"kl_ref": kl.sum().detach(), "kl_far": far.sum()}
    return LossOutput(loss, sums | {"loss": loss.detach()})


def share_scale(share: float, cap: float) -> float:
    """Factor on the loss of tokens with ``share`` of the summed gradient norms that leaves them ``cap`` of the new sum."""
    return 1.0 if share <= cap else cap * (1 - share) / (share * (1 - cap))


def _where_trained(x: Tensor, batch: Batch) -> Tensor:
    """``x`` on trained tokens, 0 elsewhere (whatever stands there, NaN included); half precision is widened first."""
    full = x if x.dtype == torch.float64 else x.float()  # [B, T]
    return torch.where(batch.loss_mask, full, torch.zeros_like(full))  # [B, T]


def _tokens(logprobs: Tensor, old: Tensor, batch: Batch, cfg: LossConfig, who: Provenance) -> Tokens:
    assert batch.advantages is not None
    log_ratio = logprobs - old  # [B, T]
    if cfg.kind == "gspo":
        by_sequence = sequence_log_ratio(log_ratio, who.own | who.peer)  # [B, T]
        log_ratio = torch.where(who.helper, log_ratio, by_sequence)  # [B, T]
    known = recorded(batch.behavior_logprobs)  # [B, T]
    if cfg.mu_source == "one":
        mu, known = torch.zeros_like(old), torch.ones_like(known)  # [B, T]
    else:
        mu = torch.where(known, batch.behavior_logprobs.to(old.dtype), torch.zeros_like(old))  # [B, T]
    if cfg.mu_source == "span":
        mu = whole_replies(old, mu, known, who.helper)  # [B, T]
    return Tokens(logprobs, old, log_ratio, mu, known, batch.advantages.to(old.dtype))


def _or_ce(weight: Tensor, row: Tensor, kind: str, count: int) -> Tensor:
    """Cross-entropy is a mean over its own tokens: its strength must not depend on how much the policy wrote."""
    return (row / max(count, 1)).expand_as(weight) if kind == "ce" else weight  # [B, T]


def _summed(token_loss: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """Weighted sum over ``mask``; what lies outside is replaced before it can meet a gradient."""
    return torch.where(mask, token_loss * weight, torch.zeros_like(token_loss)).sum()  # scalar
