"""The exact k-th largest magnitude of a stream, in two passes and 512 KiB: radix selection over the bits of fp32 values.

Non-negative floats order like their bit patterns. The first pass counts the upper 16 of 31 bits and so finds the bin of
the k-th value; the second counts the lower 15 bits within that bin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOW = 15


class KthLargest:
    """Feed every block with :meth:`count`, call :meth:`next_pass`, feed every block again, read :attr:`value`."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.total = 0
        self._counts = torch.zeros(1 << 16, dtype=torch.int64)
        self._bin: int | None = None
        self._rest = 0

    def count(self, delta: Tensor) -> None:
        """Add one block ``[r, c]`` of finite values."""
        bits = delta.float().abs().view(torch.int32).view(-1)  # [n]
        if self._bin is None:
            self.total += bits.numel()
            self._counts += torch.bincount(bits >> _LOW, minlength=1 << 16)
        else:
            inside = bits[(bits >> _LOW) == self._bin]  # [m]
            self._counts += torch.bincount(inside & ((1 << _LOW) - 1), minlength=1 << _LOW)

    def next_pass(self) -> None:
        k = kept(self.density, self.total)
        self._bin, self._rest = _from_top(self._counts, k) if k else (0, 0)
        self._counts = torch.zeros(1 << _LOW, dtype=torch.int64)

    @property
    def value(self) -> float:
        """The k-th largest magnitude, k = ceil(density * total); 0 for an empty stream."""
        if self._bin is None or self.total == 0:
            return 0.0
        low, _ = _from_top(self._counts, self._rest)
        return float(torch.tensor([(self._bin << _LOW) | low], dtype=torch.int32).view(torch.float32)[0])


def kept(density: float, total: int) -> int:
    """How many of ``total`` values are kept: rounded up, so that at least one is."""
    return min(total, math.ceil(density * total - 1e-9))


def _from_top(counts: Tensor, k: int) -> tuple[int, int]:
    """The bin that holds the k-th value from above, and its rank within the bin."""
    above = counts.flip(0).cumsum(0)  # [bins]
    place = int(torch.searchsorted(above, torch.tensor(k)))
    before = int(above[place - 1]) if place else 0
    return len(counts) - 1 - place, k - before
