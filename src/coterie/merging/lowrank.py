"""Rank-limited deltas: truncated SVD of streamed matrices, and exact sums of LoRA adapters.

Small matrices get an exact SVD. Large ones get a randomised one (Halko, Martinsson and Tropp, arXiv 0909.4061) that reads
the delta in row blocks and holds only ``(rows + cols) * (rank + 16)`` values; the energy it misses is measured exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

OVERSAMPLING = 16
POWER_ITERATIONS = 4
EXACT_SIDE = 512  # matrices with a side up to this
EXACT_VALUES = 1 << 21  # and at most so many values are decomposed exactly: three copies in fp64 are 48 MiB
PASS_MIB = 16  # working memory of a pass over a matrix; fixed, as sums over blocks depend on how it is cut

RowBlocks = Callable[[], Iterable[tuple[int, int, Tensor]]]  # one pass: (first, last, delta [last - first, cols])


@dataclass(frozen=True, slots=True)
class LowRank:
    """``delta ~ left @ right``; energies are sums of squares."""

    left: Tensor  # [rows, r]
    right: Tensor  # [r, cols]
    energy: float  # of the delta
    kept: float  # of left @ right
    exact: bool

    @property
    def values(self) -> Tensor:
        """Singular values ``[r]``, largest first."""
        norms: Tensor = torch.linalg.vector_norm(self.right, dim=1)  # [r]; left has orthonormal columns
        return norms


def truncate(blocks: RowBlocks, rows: int, cols: int, rank: int, name: str) -> LowRank:
    """The best (exact) or nearly best (randomised) rank-``rank`` approximation of a matrix read in row blocks.

    ``left`` has orthonormal columns, ``right = S V^T``. ``name`` keys the random start. Matrices of at most
    ``EXACT_VALUES`` values and with a side up to ``EXACT_SIDE`` are decomposed exactly in fp64.
    """
    rank = min(rank, rows, cols)
    if min(rows, cols) <= EXACT_SIDE and rows * cols <= EXACT_VALUES:
        d = torch.cat([b.to(torch.float64, copy=True) for _, _, b in blocks()])  # [rows, cols]
        u, s, vt = torch.linalg.svd(d, full_matrices=False)
        left, right = u[:, :rank].float(), (s[:rank, None] * vt[:rank]).float()  # [rows, r], [r, cols]
        return LowRank(left, right, float((s**2).sum()), float((s[:rank] ** 2).sum()), True)
    width = min(rank + OVERSAMPLING, rows, cols)
    key = int.from_bytes(hashlib.blake2b(f"coterie-svd-1\0{name}".encode(), digest_size=7).digest(), "little")
    basis = torch.randn(cols, width, generator=torch.Generator().manual_seed(key))  # [cols, w]
    for _ in range(POWER_ITERATIONS):
        basis = _orthonormal(_from_left(blocks, _orthonormal(_from_right(blocks, basis, rows)), cols))  # [cols, w]
    q = _orthonormal(_from_right(blocks, basis, rows))  # [rows, w]
    small = torch.zeros(width, cols, dtype=torch.float64)  # [w, cols] = q^T delta
    energy = 0.0
    for first, last, b in blocks():
        small += (q[first:last].T @ b).double()
        energy += float(b.double().pow(2).sum())
    u, s, vt = torch.linalg.svd(small, full_matrices=False)
    left = (q.double() @ u[:, :rank]).float()  # [rows, r]
    return LowRank(left, (s[:rank, None] * vt[:rank]).float(), energy, float((s[:rank] ** 2).sum()), False)


def _from_right(blocks: RowBlocks, basis: Tensor, rows: int) -> Tensor:
    out = torch.empty(rows, basis.shape[1])  # [rows, w]
    for first, last, b in blocks():
        out[first:last] = b.float() @ basis
    return out


def _from_left(blocks: RowBlocks, basis: Tensor, cols: int) -> Tensor:
    out = torch.zeros(cols, basis.shape[1])  # [cols, w]
    for first, last, b in blocks():
        out += b.float().T @ basis[first:last]
    return out


def _orthonormal(m: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(m)[0]
    return q


def compress(left: Tensor, right: Tensor, rank: int) -> LowRank:
    """The best rank-``rank`` approximation of ``left [rows, R] @ right [R, cols]``, without forming the product."""
    ql, rl = torch.linalg.qr(left.double())  # [rows, R], [R, R]
    qr, rr = torch.linalg.qr(right.double().T)  # [cols, R], [R, R]
    u, s, vt = torch.linalg.svd(rl @ rr.T)  # [R, R]
    r = min(rank, len(s))
    new_left = (ql @ u[:, :r]).float()  # [rows, r]
    new_right = (s[:r, None] * (vt[:r] @ qr.T)).float()  # [r, cols]
    return LowRank(new_left, new_right, float((s**2).sum()), float((s[:r] ** 2).sum()), True)
