"""What the loss says about itself: sums per micro-batch, metrics per step.

Every quantity is kept as plain sums, which add over micro-batches, and divided once at the end, so metrics do not
depend on how the batch was cut. Keys, formulas and healthy values: docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.config import LossConfig
from coterie.external import MAX_LOG, Provenance, Tokens, bounded_exp, recorded


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss``: scalar, differentiable. ``sums``: additive over micro-batches, detached."""

    loss: Tensor
    sums: dict[str, Tensor]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this part alone; for a step, pass the outputs of all micro-batches to :func:`loss_metrics`."""
        return loss_metrics([self])


def diagnostics(
    loss: Tensor,
    tokens: Tokens,
    batch: Batch,
    who: Provenance,
    weight: Tensor,
    cfg: LossConfig,
    entropy: Tensor | None,
    sum_sq: Tensor | None,
) -> dict[str, Tensor]:
    """Sums for :func:`loss_metrics`, each over the tokens of one provenance.

    Args:
        loss: the policy part, before the KL term, with the graph that leads to ``tokens.logprobs``.
        weight: [B, T] weight of an own token.
        entropy, sum_sq: [B, T] entropy in nats and ``sum_v p_v^2``, if the policy reports them.
    """
    push = torch.zeros_like(tokens.logprobs)  # [B, T] d loss / d log p
    if loss.requires_grad and tokens.logprobs.requires_grad:
        push = torch.autograd.grad(loss, tokens.logprobs, retain_graph=True)[0]  # [B, T]
    each = _per_token(tokens, push, weight, batch, cfg)
    every, at_known = dict(each.every), dict(each.at_known)
    if sum_sq is not None:
        # Norm of d log p / d logits: sqrt(1 - 2p + sum_v p_v^2).
        norm = (1 - 2 * tokens.logprobs.detach().exp() + sum_sq.detach()).clamp(min=0).sqrt()  # [B, T]
        every["grad"] = push.abs() * norm  # [B, T]
        at_known |= {"bias": each.off_unbiased * norm, "bias_n": push.abs() * norm}  # [B, T]
    if entropy is not None:
        every["entropy"] = entropy.detach()  # [B, T]
    out: dict[str, Tensor] = {"non_finite": ((~tokens.logprobs.detach().isfinite()) & batch.loss_mask).sum()}
    n = batch.normalizers
    present = {"own": n.own_policy, "peer": n.peer_policy, "helper": n.helper}
    for name, mask in who.items():
        if not present[name]:
            continue
        values = every | _clipping(name, tokens, cfg)
        out |= _sums(name, values, mask)
        out |= _sums(name, at_known, mask & each.known)
        if name == "helper" and batch.role is not None:
            for i, role in enumerate(batch.roles, 1):
                of_role = mask & (batch.role == i)  # [B, T]
                out |= _sums(f"helper/{role}", values, of_role)
                out |= _sums(f"helper/{role}", at_known, of_role & each.known)
    if entropy is not None:
        after = who.own & (who.helper.cumsum(1) > 0)  # [B, T]
        out |= _sums("own", {"n_after": torch.ones_like(entropy), "entropy_after": entropy.detach()}, after)
    return out


def _sums(name: str, values: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sums over ``mask``. Selecting with ``where`` and not by index keeps a GPU from waiting at each one."""
    return {f"{name}/{key}": torch.where(mask, v, torch.zeros_like(v)).sum() for key, v in values.items()}


@dataclass(frozen=True, slots=True)
class _PerToken:
    every: dict[str, Tensor]  # summed over all tokens of a provenance
    at_known: dict[str, Tensor]  # summed where the writer's log-prob was recorded
    known: Tensor  # [B, T] bool
    off_unbiased: Tensor  # [B, T] |push - what token-level importance sampling would push|


def _per_token(tokens: Tokens, push: Tensor, weight: Tensor, batch: Batch, cfg: LossConfig) -> _PerToken:
    lp, old, a = tokens.logprobs.detach(), tokens.old, tokens.advantages  # [B, T]
    ones = torch.ones_like(lp)  # [B, T]
    ratio = bounded_exp(lp - old)  # [B, T]
    known = recorded(batch.behavior_logprobs)  # [B, T]
    gap = torch.where(known, old - batch.behavior_logprobs.to(lp.dtype), torch.zeros_like(lp))  # [B, T] log rho0
    gap = gap.clamp(-MAX_LOG, MAX_LOG)  # [B, T] one absurd value from a peer must not drown the mean
    rho0 = gap.exp()  # [B, T]
    used = bounded_exp(old - tokens.mu)  # [B, T] rho0 as the loss sees it (unknown mu: 1)
    # In units of what an own token with this advantage gets at ratio 1: the coefficient c, clipping included.
    coefficient = torch.where(weight > 0, push.abs() / weight, torch.zeros_like(push))  # [B, T]
    every = {
        "n": ones,
        "ratio": bounded_exp(tokens.log_ratio.detach()),
        "kl_old": ratio - 1 - (lp - old),
        "nll": -lp,
        "abs_a": a.abs(),
        "coef": coefficient,
        "floored": ((a > 0) & (used < cfg.c_min)).to(lp.dtype),
        "capped": (used > cfg.c_max).to(lp.dtype),
    }
    at_known = {"known": ones, "gap": gap.abs(), "k1": -gap, "k3": rho0 - 1 - gap, "w": rho0, "w2": rho0.square()}
    return _PerToken(every, at_known, known, (push + weight * rho0 * ratio * a).abs())


def _clipping(name: str, tokens: Tokens, cfg: LossConfig) -> dict[str, Tensor]:
    """Tokens [B, T] whose gradient the clip stops: above where A > 0, below where A < 0. Nothing for unclipped options."""
    kind = {"own": "surrogate", "peer": cfg.peer_loss, "helper": cfg.external_loss}[name]
    if kind in ("masked", "luffy", "ce"):
        return {}
    low, high = (cfg.ext_clip_low, cfg.ext_clip_high) if kind == "aipo" else (cfg.clip_low, cfg.clip_high)
    log_ratio = (tokens.logprobs - tokens.mu if kind == "ppo_is" else tokens.log_ratio).detach()  # [B, T]
    ratio, a = bounded_exp(log_ratio), tokens.advantages  # [B, T]
    unweighed = ~tokens.known & (kind == "ppo_is")  # [B, T] left out of the loss, so not clipped (and never above 1)
    return {
        "clip_high": ((a > 0) & (ratio > 1 + high)).to(a.dtype),  # [B, T]
        "clip_low": ((a < 0) & (ratio < 1 - low) & ~unweighed).to(a.dtype),  # [B, T]
    }


def loss_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Metrics of one update from the outputs of all its micro-batches. Every value is finite: a quantity that is not
    (or has no tokens) is left out, and ``loss/non_finite_tokens`` counts trained tokens without a finite log-prob."""
    total: dict[str, float] = {}
    for output in outputs:
        keys = list(output.sums)
        values = torch.stack([output.sums[k].to(output.loss.dtype) for k in keys]).detach().tolist()
        for key, value in zip(keys, values, strict=True):
            total[key] = total.get(key, 0.0) + value
    counts = {name: total.get(f"{name}/n", 0.0) for name in ("own", "peer", "helper")}
    metrics = {
        "loss/total": total.get("loss", 0.0),
        "loss/trained_tokens": sum(counts.values()),
        "loss/non_finite_tokens": total.get("non_finite", 0.0),
    }
    if "kl_ref" in total and counts["own"]:
        metrics["loss/kl_ref"] = total["kl_ref"] / counts["own"]
        metrics["loss/kl_ref_far"] = total["kl_far"] / counts["own"]
    all_grad = sum(total.get(f"{name}/grad", 0.0) for name in counts)
    roles = [key.removesuffix("/n") for key in total if key.count("/") == 2 and key.endswith("/n")]
    for name, n in (counts | {role: total[f"{role}/n"] for role in roles}).items():
        if n:
            sums = {key.removeprefix(f"{name}/"): v for key, v in total.items() if key.startswith(f"{name}/")}
            metrics |= {f"loss/{name}/{key}": v for key, v in _of_provenance(sums, all_grad, name).items()}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def _of_provenance(s: dict[str, float], all_grad: float, name: str) -> dict[str, float]:
    n, known = s["n"], s["known"]
    out = {"tokens": n}
    means = ("ratio", "clip_high", "clip_low", "kl_old", "nll", "entropy")
    out |= {key: s[key] / n for key in means if key in s}
    if known:
        out |= {"behavior_gap": s["gap"] / known}
    if s.get("n_after"):
        out["entropy_after_help"] = s["entropy_after"] / s["n_after"]
    if "grad" in s and all_grad:
        out["gradient_share"] = s["grad"] / all_grad
    if name == "own":
        return out
    out |= {"unknown": 1 - known / n, "floored": s["floored"] / n, "capped": s["capped"] / n}
    if s["abs_a"]:
        out["coefficient"] = s["coef"] / s["abs_a"]
    if known:
        out |= {"behavior_k1": s["k1"] / known, "behavior_k3": s["k3"] / known, "behavior_chi2": s["w2"] / known - 1}
        out["ess"] = s["w"] ** 2 / (known * s["w2"])
    if s.get("bias_n"):
        out["bias"] = s["bias"] / s["bias_n"]
    return out
