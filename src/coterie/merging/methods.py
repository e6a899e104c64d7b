"""The merge formulas, on one block of deltas at a time. Pure functions; N experts, blocks ``[r, c]``.

All return the update to add to the base, lambda and weights included. Sources: sum, Ilharco et al. arXiv 2212.04089; mean,
Wortsman et al. 2203.05482; TIES, Yadav et al. 2306.01708; DARE, Yu et al. 2311.03099.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def weighted_sum(deltas: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """``sum_i c_i d_i``."""
    out = deltas[0] * coefficients[0]  # [r, c]
    for d, c in zip(deltas[1:], coefficients[1:], strict=True):
        out.add_(d, alpha=c)  # [r, c]
    return out


def trim(delta: Tensor, threshold: float) -> Tensor:
    """Zero what is smaller in magnitude than ``threshold``; equal magnitudes stay. ``[r, c] -> [r, c]``"""
    return torch.where(delta.abs() >= threshold, delta, 0.0)  # [r, c]


def elect_and_average(deltas: Sequence[Tensor], weights: Sequence[float], lam: float) -> Tensor:
    """TIES after its trim: per value, the sign of ``sum_i w_i d_i`` (an exact tie elects plus), then the weighted mean of
    the non-zero values of that sign.

    ``lam * sum_{i in A} w_i d_i / sum_{i in A} w_i`` with A = experts whose value has the elected sign; 0 if none has.
    """
    plus = weighted_sum(deltas, weights) >= 0  # [r, c]
    total, share = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])  # [r, c]
    for d, w in zip(deltas, weights, strict=True):
        agrees = torch.where(plus, d > 0, d < 0)  # [r, c]
        total.add_(torch.where(agrees, d, 0.0), alpha=w)
        share.add_(agrees, alpha=w)
    return total.div_(share.clamp_min_(min(weights))).mul_(lam)  # where nobody agrees total is 0


def dare_key(seed: int, label: str, tensor: str) -> int:
    """128-bit key of the mask of one expert's tensor; independent of the order of experts, shards and blocks."""
    return int.from_bytes(
        hashlib.blake2b(f"coterie-dare-1\0{seed}\0{label}\0{tensor}".encode(), digest_size=16).digest(), "little"
    )


def dare_mask(key: int, first: int, count: int, density: float) -> Tensor:
    """Which of the values ``first : first + count`` (flat, row-major) of a tensor are kept: bool ``[count]``.

    Value e uses the e-th 32-bit word of a Philox stream, so any block of any size gives the same mask.
    """
    words_per_step = 8  # one Philox step gives four 64-bit words
    skip = first % words_per_step
    bits = np.random.Philox(key=key).advance(first // words_per_step).random_raw((skip + count + 1) // 2)
    words = np.asarray(bits, "<u8").view("<u4")[skip : skip + count]  # [count]
    return torch.from_numpy(words < np.uint64(round(density * 2**32)))  # [count]


def dare(delta: Tensor, key: int, first: int, density: float) -> Tensor:
    """Drop at random, rescale by exactly ``1 / density``. ``first``: flat index of the block's first value."""
    keep = dare_mask(key, first, delta.numel(), density).view_as(delta)  # [r, c]
    return torch.where(keep, delta, 0.0).div_(density)  # [r, c]
