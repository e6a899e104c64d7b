"""Inner products of deltas, exactly: fp32 products summed within rows or pieces of 4096 values, fp64 across them."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.merging.deltas import one_thread_each, stream
from coterie.merging.inputs import Inputs

_PIECE = 4096


def row_grams(x: Tensor) -> Tensor:
    """``x [N, r, c] -> [r, N, N]`` in fp64: for every row the inner products of the N vectors."""
    rows = x.transpose(0, 1)  # [r, N, c]
    return torch.bmm(rows, rows.transpose(1, 2)).double()  # [r, N, N]


def block_gram(x: Tensor) -> Tensor:
    """``x [N, n] -> [N, N]`` in fp64."""
    n = x.shape[1] // _PIECE * _PIECE
    out = row_grams(x[:, :n].reshape(len(x), -1, _PIECE)).sum(0)  # [N, N]
    tail = x[:, n:].double()  # [N, < 4096]
    return out + tail @ tail.T


def gram_pass(inputs: Inputs, chunk_mib: int = 64) -> Tensor:
    """``[N, N]`` inner products of all deltas over all merged values, in one pass over the files.

    Norms, cosines, and the norm of any weighted sum follow from it: ``|sum_i w_i d_i|^2 = w^T G w``.
    """
    total = torch.zeros(len(inputs.experts), len(inputs.experts), dtype=torch.float64)  # [N, N]
    with one_thread_each():
        for block in stream(inputs, [e for e in inputs.entries if e.merged], chunk_mib):
            total += block_gram(block.deltas.flatten(1))
    return total
