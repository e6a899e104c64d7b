"""What chance alone would show: sparsity of dense drift stored in bf16, overlap of supports of equally visible updates."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

SAMPLE = 1 << 15  # base weights per tensor on which the drift is simulated
_STEPS = 24  # halvings of the interval in which sigma is sought


def normal(name: str, count: int) -> Tensor:
    """Standard normal draws keyed by a tensor's name, ``[count]``."""
    key = int.from_bytes(hashlib.blake2b(f"coterie-null-1\0{name}".encode(), digest_size=7).digest(), "little")
    return torch.randn(count, generator=torch.Generator().manual_seed(key))  # [count]


def rounded_drift(base: Tensor, z: Tensor, sigma: float) -> Tensor:
    """The update that is left when ``base + sigma z`` is stored in bf16, ``[n]``."""
    return (base + sigma * z).bfloat16().float() - base.bfloat16().float()  # [n]


def fit_sigma(base: Tensor, z: Tensor, visible: float, rms: float) -> float:
    """The sigma at which dense drift stored in bf16 changes the share ``visible`` of the weights; bisection from ``rms``.

    The rms of a delta between two bf16 files is no estimate of it: most small steps are lost and the others are rounded up.
    """
    low, high = rms * 2.0**-8, rms * 2.0**8
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if float(rounded_drift(base, z, middle).ne(0).float().mean()) < visible:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def expected_overlap(counts_i: Tensor, counts_j: Tensor, sizes: Tensor) -> float:
    """Expected common support of two independent updates: ``sum_b n_b p_ib p_jb`` over strata b of weights.

    Strata are (tensor, bf16 exponent of the base weight): the spacing of bf16 numbers grows with their size, so small weights
    show the same step more often, in every update alike. All arguments ``[strata]``.
    """
    filled = sizes > 0
    return float((counts_i[filled] * counts_j[filled] / sizes[filled]).sum())


def exponents(base: Tensor) -> Tensor:
    """Exponent bits of fp32 (= bf16) values, ``[n] -> [n]`` int64."""
    return ((base.view(torch.int32) >> 23) & 0xFF).long()  # [n]
