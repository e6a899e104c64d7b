"""Inner products of weights as they lie in a file, compiled by numba: stored bits in, fp64 sums out, nothing in between leaves
the nearest cache.

The functions are in a file of their own because importing numba takes longer than merging a small model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.compiling import compiled, part

PIECE = 2048  # values whose products are summed in fp32 before the sum goes on in fp64


@part
def _differences(stored: NDArray[Any], first: int, count: int, shift: int, room: NDArray[np.float32]) -> None:
    """Experts minus base. ``shift`` fp32 bits are not stored: the bits of a bf16 value are the upper half of an fp32 value's."""
    base = stored[0, first : first + count]  # slices: loops over them are known to stay within, and use vectors
    for i in range(room.shape[0]):
        expert, out = stored[i + 1, first : first + count], room[i]
        for k in range(count):
            a = np.uint32(np.uint32(expert[k]) << np.uint32(shift)).view(np.float32)
            b = np.uint32(np.uint32(base[k]) << np.uint32(shift)).view(np.float32)
            out[k] = a - b


@compiled
def _products(x: NDArray[np.float32], first: int, count: int, out: NDArray[np.float64]) -> None:
    """Upper half of ``out [N, N] += x x^T`` over ``count`` of the values ``x [N, n]``: fp32 products, fp64 results."""
    n = x.shape[0]
    for i in range(n):
        a = x[i, first : first + count]
        j = i
        while j + 4 <= n:  # four at a time: each value of a is then loaded once for four products
            b0, b1 = x[j, first : first + count], x[j + 1, first : first + count]
            b2, b3 = x[j + 2, first : first + count], x[j + 3, first : first + count]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for k in range(count):
                s0 += a[k] * b0[k]
                s1 += a[k] * b1[k]
                s2 += a[k] * b2[k]
                s3 += a[k] * b3[k]
            out[i, j] += s0
            out[i, j + 1] += s1
            out[i, j + 2] += s2
            out[i, j + 3] += s3
            j += 4
        while j < n:
            b = x[j, first : first + count]
            s = np.float32(0.0)
            for k in range(count):
                s += a[k] * b[k]
            out[i, j] += s
            j += 1


@compiled
def add_gram(x: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """Upper half of ``out [N, N]`` plus the inner products of ``x [N, n]``."""
    for first in range(0, x.shape[1], PIECE):
        _products(x, first, min(PIECE, x.shape[1] - first), out)


@part
def _add_stored(stored: NDArray[Any], shift: int, room: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    for first in range(0, stored.shape[1], PIECE):
        count = min(PIECE, stored.shape[1] - first)
        _differences(stored, first, count, shift, room)
        _products(room, 0, count, out)


@compiled
def add_bf16_gram(stored: NDArray[np.uint16], room: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """Upper half of ``out [N, N]`` plus the inner products of the N differences from the first row of ``stored [1 + N, n]``.

    ``stored`` holds the bits of the values; ``room [N, PIECE]`` is worked in.
    """
    _add_stored(stored, 16, room, out)


@compiled
def add_fp32_gram(stored: NDArray[np.uint32], room: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """The same for fp32 values."""
    _add_stored(stored, 0, room, out)
