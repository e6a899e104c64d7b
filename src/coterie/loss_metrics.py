"""What the loss says about itself: sums per micro-batch, metrics per step.

Every quantity is kept as plain sums, which add over micro-batches, and divided once at the end, so metrics do not
depend on how the batch was cut. Keys, formulas and healthy values: docs/losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.batching import Batch
from coterie.config import LossConfig
from coterie.external import bounded_exp, recorded


@dataclass(frozen=True, slots=True)
class Provenance:
    """Masks [B, T] of trained tokens; disjoint."""

    own: Tensor
    peer: Tensor
    helper: Tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("own", self.own), ("peer", self.peer), ("helper", self.helper))


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
    logprobs: Tensor,
    old: Tensor,
    batch: Batch,
    who: Provenance,
    weight: Tensor,
    cfg: LossConfig,
    entropy: Tensor | None,
    sum_sq: Tensor | None,
) -> dict[str, Tensor]:
    """Sums for :func:`loss_metrics`. ``loss`` is the policy part, before the KL term; all other tensors are [B, T]."""
    assert batch.advantages is not None
    push = torch.zeros_like(logprobs)  # [B, T] d loss / d log p
    if loss.requires_grad and logprobs.requires_grad:
        push = torch.autograd.grad(loss, logprobs, retain_graph=True)[0]  # [B, T]
    lp = logprobs.detach()  # [B, T]
    ratio = bounded_exp(lp - old)  # [B, T]
    a = batch.advantages.to(lp.dtype)  # [B, T]
    known = recorded(batch.behavior_logprobs)  # [B, T]
    gap = torch.where(known, old - batch.behavior_logprobs.to(lp.dtype), torch.zeros_like(lp))  # [B, T] log rho0
    rho0 = bounded_exp(gap)  # [B, T]
    # Relative to what an own token with this advantage gets at ratio 1: the coefficient c, clipping included.
    coefficient = torch.where(weight > 0, push.abs() / weight, torch.zeros_like(push))  # [B, T]
    # Norm of d log p / d logits: sqrt(1 - 2p + sum_v p_v^2).
    norm = (1 - 2 * lp.exp() + sum_sq).clamp(min=0).sqrt() if sum_sq is not None else None  # [B, T]
    out: dict[str, Tensor] = {"non_finite": ((~lp.isfinite()) & batch.loss_mask).sum()}
    for name, mask in who.items():
        high, low = (
            (cfg.clip_high, cfg.clip_low) if _option(name, cfg) != "aipo" else (cfg.ext_clip_high, cfg.ext_clip_low)
        )

        def add(key: str, value: Tensor, on: Tensor = mask, name: str = name) -> None:
            out[f"{name}/{key}"] = value[on].sum()

        add("n", torch.ones_like(lp))
        add("ratio", ratio)
        add("clip_high", ((a > 0) & (ratio > 1 + high)).to(lp.dtype))
        add("clip_low", ((a < 0) & (ratio < 1 - low)).to(lp.dtype))
        add("kl_old", ratio - 1 - (lp - old))
        add("nll", -lp)
        add("abs_a", a.abs())
        add("coef", coefficient)
        at = mask & known  # [B, T]
        add("known", torch.ones_like(lp), at)
        add("gap", gap.abs(), at)
        add("k1", -gap, at)
        add("k3", rho0 - 1 - gap, at)
        add("w", rho0, at)
        add("w2", rho0.square(), at)
        add("floored", ((a > 0) & (rho0 < cfg.c_min)).to(lp.dtype), at)
        add("capped", (rho0 > cfg.c_max).to(lp.dtype), at)
        if norm is not None:
            add("grad", push.abs() * norm)
            add("bias", (-push - weight * rho0 * ratio * a).abs() * norm, at)
            add("bias_n", push.abs() * norm, at)
        if entropy is not None:
            add("entropy", entropy.detach())
    if entropy is not None:
        after = who.own & (who.helper.cumsum(1) > 0)  # [B, T]
        out |= {"own/n_after": after.sum(), "own/entropy_after": entropy.detach()[after].sum()}
    return out


def _option(name: str, cfg: LossConfig) -> str:
    return {"own": "surrogate", "peer": cfg.peer_loss, "helper": cfg.external_loss}[name]


def loss_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Metrics of one update from the outputs of all its micro-batches. Every value is finite: a quantity that is not
    (or has no tokens) is left out, and ``loss/non_finite_tokens`` counts trained tokens without a finite log-prob."""
    total: dict[str, float] = {}
    for output in outputs:
        keys = list(output.sums)
        for key, value in zip(keys, torch.stack([output.sums[k].double() for k in keys]).tolist(), strict=True):
            total[key] = total.get(key, 0.0) + value
    counts = {name: total.get(f"{name}/n", 0.0) for name in ("own", "peer", "helper")}
    metrics = {
        "loss/total": total.get("loss", 0.0),
        "loss/trained_tokens": sum(counts.values()),
        "loss/nothing_to_train": float(sum(counts.values()) == 0),
        "loss/non_finite_tokens": total.get("non_finite", 0.0),
    }
    if "kl_ref" in total and counts["own"]:
        metrics["loss/kl_ref"] = total["kl_ref"] / counts["own"]
        metrics["loss/kl_ref_far"] = total["kl_far"] / counts["own"]
    all_grad = sum(total.get(f"{name}/grad", 0.0) for name in counts)
    for name, n in counts.items():
        if n:
            sums = {key.removeprefix(f"{name}/"): v for key, v in total.items() if key.startswith(f"{name}/")}
            metrics |= {f"loss/{name}/{key}": v for key, v in _of_provenance(sums, all_grad, name).items()}
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def _of_provenance(s: dict[str, float], all_grad: float, name: str) -> dict[str, float]:
    n, known = s["n"], s["known"]
    out = {"tokens": n, "unknown": 1 - known / n}
    out |= {key: s[key] / n for key in ("ratio", "clip_high", "clip_low", "kl_old", "nll", "entropy") if key in s}
    if s["abs_a"]:
        out["coefficient"] = s["coef"] / s["abs_a"]
    if known:
        out |= {"behavior_gap": s["gap"] / known, "behavior_k1": s["k1"] / known, "behavior_k3": s["k3"] / known}
        out["ess"] = s["w"] ** 2 / (known * s["w2"])
        if name != "own":
            out |= {"floored": s["floored"] / known, "capped": s["capped"] / known}
    if "grad" in s and all_grad:
        out["gradient_share"] = s["grad"] / all_grad
    if s.get("bias_n"):
        out["bias"] = s["bias"] / s["bias_n"]
    if s.get("n_after"):
        out["entropy_after_help"] = s["entropy_after"] / s["n_after"]
    return out
