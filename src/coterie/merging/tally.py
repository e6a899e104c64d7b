"""Sums from which every figure of the interference report follows; they add up over tensors, so every scope is free."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from coterie.merging import nulls
from coterie.merging.deltas import Block
from coterie.merging.gram import row_grams

THRESHOLDS = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass
class Sums:
    """Sums over some tensors, fp64. N experts, T thresholds."""

    values: Tensor  # [] how many
    base: Tensor  # [] sum w^2
    gram: Tensor  # [N, N] sum d_i d_j
    squares: Tensor  # [N, N] sum d_i^2 d_j^2
    rows: Tensor  # [N, N] sum over rows of (sum over the row d_i d_j)^2
    absolute: Tensor  # [N, N] sum |d_i d_j|
    signs: Tensor  # [N, N] sum sign(d_i) sign(d_j)
    nonzero: Tensor  # [N, N] values where both differ from 0
    both: Tensor  # [N, N] values where both are visible in bf16
    chance: Tensor  # [N, N] the same, expected of independent updates of the same visibility
    above: Tensor  # [N, T] values with |d| > t
    rounded: Tensor  # [N, T] the same once base and expert are stored in bf16
    null: Tensor  # [N, T] the same for simulated dense drift stored in bf16
    null_visible: Tensor  # [N]
    opposed: Tensor  # [N, N] sum over tensors of -<d_i, d_j> where it is negative
    aligned: Tensor  # [N, N] sum over tensors of <d_i, d_j> where it is positive

    @classmethod
    def zero(cls, n: int) -> Sums:
        t = len(THRESHOLDS)
        shapes = {"values": (), "base": (), "above": (n, t), "rounded": (n, t), "null": (n, t), "null_visible": (n,)}
        return cls(**{f.name: torch.zeros(shapes.get(f.name, (n, n)), dtype=torch.float64) for f in fields(cls)})

    def include(self, other: Sums) -> None:
        for f in fields(self):
            getattr(self, f.name).add_(getattr(other, f.name))


class TensorTally:
    """Collects one tensor's blocks; :meth:`finish` adds the nulls, which need the tensor's totals."""

    def __init__(self, block: Block, coarse: list[bool]) -> None:
        self.name, n = block.entry.name, len(block.deltas)
        self.coarse = coarse  # experts stored in 16 bits, whose own rms is biased
        self.sums = Sums.zero(n)
        self._strata = torch.zeros(256, dtype=torch.float64)
        self._visible = torch.zeros(n, 256, dtype=torch.float64)
        self._stride = max(1, -(-block.entry.base.numel // nulls.SAMPLE))
        self._seen = 0
        self._sample: list[Tensor] = []

    def add(self, block: Block) -> None:
        s, w = self.sums, block.base.reshape(-1)  # [n]
        d = block.deltas  # [N, r, c]
        s.values += w.numel()
        s.base += w.double() @ w.double()
        grams = row_grams(d)  # [r, N, N]
        s.gram += grams.sum(0)
        s.rows += grams.square_().sum(0)
        s.squares += row_grams(d * d).sum(0)
        size = d.abs()  # [N, r, c]
        s.absolute += row_grams(size).sum(0)
        sign = d.sign()
        s.signs += row_grams(sign).sum(0)
        s.nonzero += row_grams(sign.abs_()).sum(0)
        coarse_base = block.base.bfloat16()  # [r, c]
        stored = (block.base + d).bfloat16()  # [N, r, c]
        visible = stored != coarse_base  # [N, r, c]
        s.both += row_grams(visible.float()).sum(0)
        step = stored.float().sub_(coarse_base.float()).abs_()  # [N, r, c]
        for k, t in enumerate(THRESHOLDS):
            s.above[:, k] += (size > t).flatten(1).sum(1)
            s.rounded[:, k] += (step > t).flatten(1).sum(1)
        strata = nulls.exponents(w)  # [n]
        self._strata += torch.bincount(strata, minlength=256)
        for i, v in enumerate(visible.flatten(1)):
            self._visible[i] += torch.bincount(strata[v], minlength=256)
        self._sample.append(w[-self._seen % self._stride :: self._stride].clone())
        self._seen += w.numel()

    def finish(self) -> Sums:
        s, n = self.sums, len(self.coarse)
        for i in range(n):
            for j in range(n):
                s.chance[i, j] = nulls.expected_overlap(self._visible[i], self._visible[j], self._strata)
        s.aligned += s.gram.clamp(min=0)
        s.opposed += (-s.gram).clamp(min=0)
        sample = torch.cat(self._sample)  # [m]
        z = nulls.normal(self.name, len(sample))
        for i in range(n):
            rms = math.sqrt(float(s.gram[i, i] / s.values)) if s.values else 0.0
            visible = float(s.both[i, i] / s.values) if s.values else 0.0
            if rms == 0:
                continue
            sigma = nulls.fit_sigma(sample, z, visible, rms) if self.coarse[i] and 0 < visible < 1 else rms
            drift = nulls.rounded_drift(sample, z, sigma).abs_()  # [m]
            s.null_visible[i] += float(drift.ne(0).double().mean()) * s.values
            for k, t in enumerate(THRESHOLDS):
                s.null[i, k] += float((drift > t).double().mean()) * s.values
        return s


def figures(s: Sums, labels: list[str], scope: str) -> dict[str, Any]:
    """The report's figures for one scope. ``None`` where a figure is undefined (a delta that is zero there)."""
    n = len(labels)
    values = float(s.values)
    experts = {}
    for i, label in enumerate(labels):
        experts[label] = {
            "l2_norm": math.sqrt(float(s.gram[i, i])),
            "relative_to_base": _ratio(math.sqrt(float(s.gram[i, i])), math.sqrt(float(s.base))),
            "share_nonzero": float(s.nonzero[i, i]) / values,
            "share_visible_in_bf16": float(s.both[i, i]) / values,
            "share_visible_in_bf16_null": float(s.null_visible[i]) / values,
            "share_above": {f"{t:g}": float(s.above[i, k]) / values for k, t in enumerate(THRESHOLDS)},
            "share_above_in_bf16": {f"{t:g}": float(s.rounded[i, k]) / values for k, t in enumerate(THRESHOLDS)},
            "share_above_in_bf16_null": {f"{t:g}": float(s.null[i, k]) / values for k, t in enumerate(THRESHOLDS)},
        }
    pairs = [_pair(s, i, j, labels) for i in range(n) for j in range(i + 1, n)]
    return {
        "scope": scope,
        "values": int(values),
        "base_l2_norm": math.sqrt(float(s.base)),
        "experts": experts,
        "pairs": pairs,
    }


def _pair(s: Sums, i: int, j: int, labels: list[str]) -> dict[str, Any]:
    def at(m: Tensor) -> float:
        return float(m[i, j])

    norm = math.sqrt(float(s.gram[i, i]) * float(s.gram[j, j]))
    union = float(s.both[i, i] + s.both[j, j]) - at(s.both)
    union_null = float(s.both[i, i] + s.both[j, j]) - at(s.chance)
    jaccard, null = _ratio(at(s.both), union), _ratio(at(s.chance), union_null)
    return {
        "experts": [labels[i], labels[j]],
        "inner_product": at(s.gram),
        "cosine": _ratio(at(s.gram), norm),
        "chance_cosine": _ratio(math.sqrt(at(s.squares)), norm),  # standard deviation under independent sign flips
        "z_sign_flip": _ratio(at(s.gram), math.sqrt(at(s.squares))),
        "z_row_flip": _ratio(at(s.gram), math.sqrt(at(s.rows))),
        "sign_conflict_share": _ratio((at(s.nonzero) - at(s.signs)) / 2, at(s.nonzero)),
        "sign_conflict_energy": _ratio((at(s.absolute) - at(s.gram)) / 2, at(s.absolute)),
        "conflict_mass": _ratio(at(s.opposed), at(s.opposed) + at(s.aligned)),
        "support_jaccard": jaccard,
        "support_jaccard_null": null,
        "support_overlap_over_null": _ratio(at(s.both), at(s.chance)),
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 else None
