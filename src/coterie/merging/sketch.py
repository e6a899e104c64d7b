"""Linear sketches of vectors with as many values as a model: inner products of what cannot be kept whole.

A count sketch (Charikar, Chen, Farach-Colton 2002) adds every value, with a random sign, to one of ``width`` buckets.
Bucket and sign are a fixed function of the tensor's name and the value's place, so sketches made by different processes,
at different times, can be compared and added. Inner products are unbiased, with a standard deviation of about
``|a| |b| / sqrt(width)``: cosines below ``3 / sqrt(width)`` are not resolved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

VERSION = 1  # of the hash: sketches of different versions must not be compared


class Projection(Protocol):
    """A fixed linear map of named tensors to one vector."""

    @property
    def width(self) -> int: ...
    @property
    def floor(self) -> float:
        """Smallest cosine that three standard deviations of the map's own error leave visible."""

    def add(self, out: Tensor, name: str, values: Tensor) -> None:
        """``out [width] +=`` the image of one tensor."""


class CountSketch:
    """``width``: a power of two. Keeps 5 bytes per value of the tensors seen."""

    def __init__(self, width: int) -> None:
        if width < 2 or width & (width - 1):
            raise ValueError(f"sketch width must be a power of two, not {width}")
        self.width = width
        self.floor = 3 / math.sqrt(width)
        self._maps: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, out: Tensor, name: str, values: Tensor) -> None:
        if name not in self._maps:
            self._maps[name] = self._map(name, values)
        bucket, sign = self._maps[name]
        out.index_add_(0, bucket, values.detach().reshape(-1).float() * sign)

    def _map(self, name: str, values: Tensor) -> tuple[Tensor, Tensor]:
        key = int.from_bytes(hashlib.blake2b(f"{VERSION}:{name}".encode(), digest_size=8).digest(), "little")
        x = np.arange(values.numel(), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)  # splitmix64
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        bucket = (x & np.uint64(self.width - 1)).astype(np.int32)
        sign = 1 - 2 * (x >> np.uint64(63)).astype(np.int8)
        return torch.from_numpy(bucket).to(values.device), torch.from_numpy(sign).to(values.device)


class Whole:
    """No sketch: all values side by side."""

    floor = 0.0

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._at: dict[str, slice] = {}
        self.width = 0
        for name, t in tensors.items():
            self._at[name] = slice(self.width, self.width + t.numel())
            self.width += t.numel()

    def add(self, out: Tensor, name: str, values: Tensor) -> None:
        out[self._at[name]] += values.detach().reshape(-1)
