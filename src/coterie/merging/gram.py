"""Inner products of deltas, exactly: fp32 products summed within a row or a piece of 2048 values, fp64 across them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.merging.checkpoints import Reader, TensorInfo
from coterie.merging.deltas import Span, blocks_of, one_thread_each, row_blocks
from coterie.merging.inputs import Entry, Full, Inputs

_SPAN = 1 << 19  # values that a thread takes at once
READ = 1 << 16  # values read of each model before they are multiplied: they stay in a core's cache
_BITS = {"BF16": np.uint16, "F32": np.uint32}  # stored types that the kernel reads as they are


def row_grams(x: Tensor) -> Tensor:
    """``x [N, r, c] -> [r, N, N]`` in fp64: for every row the inner products of the N vectors."""
    rows = x.transpose(0, 1)  # [r, N, c]
    return torch.bmm(rows, rows.transpose(1, 2)).double()  # [r, N, N]


def gram_pass(inputs: Inputs, chunk_mib: int = 64, threads: int = 0) -> Tensor:
    """``[N, N]`` inner products of all deltas over all merged values, fp64, in one pass over the files.

    Norms, cosines, and the norm of any weighted sum follow from it: ``|sum_i w_i d_i|^2 = w^T G w``. ``threads`` (0: one per
    core) each read, convert and multiply their own spans; the sum runs in the order of the spans, whoever made them.
    """
    from coterie.merging.kernels import add_gram

    workers, n = threads or os.cpu_count() or 1, len(inputs.experts)
    values = min(_SPAN, max(4096, (chunk_mib << 20) // (workers * 8 * (n + 1))))
    spans = [
        Span(e, first, last)
        for e in inputs.entries
        if e.merged
        for first, last in row_blocks(0, e.base.rows, e.base.cols, values)
    ]
    shared = iter(enumerate(spans))
    parts = np.zeros((len(spans), n, n))  # [spans, N, N], the upper halves

    def work(_: int) -> None:
        with Reader() as reader:
            plain = _Plain(reader, n)
            for at, span in shared:  # each thread takes the next that nobody has taken
                infos = plain_infos(span.entry)
                if infos is not None:
                    plain(infos, span, parts[at])
                    continue
                for block in blocks_of(inputs, span, values, reader):
                    add_gram(block.deltas.flatten(1).numpy(), parts[at])

    with one_thread_each(), ThreadPoolExecutor(workers, "coterie-gram") as pool:
        list(pool.map(work, range(workers)))
    upper = torch.from_numpy(parts.sum(0))  # [N, N]
    return upper + upper.triu(1).T


def plain_infos(entry: Entry) -> list[TensorInfo] | None:
    """The base's and the experts' tensors where the kernel can read all of them side by side; else None."""
    infos = [entry.base]
    for s in entry.sources:
        if not isinstance(s, Full) or s.rows is not None or s.info.code != entry.base.code:
            return None
        infos.append(s.info)
    return infos if entry.base.code in _BITS else None


class _Plain:
    """Spans of tensors stored alike: a little of every model is read, and multiplied while it is in the cache."""

    def __init__(self, reader: Reader, experts: int) -> None:
        from coterie.merging.kernels import PIECE, add_bf16_gram, add_fp32_gram

        self._reader, self._add = reader, {"BF16": add_bf16_gram, "F32": add_fp32_gram}
        self._most = max(PIECE, READ * 5 // (experts + 1) // PIECE * PIECE)
        self._raw = np.empty(4 * (experts + 1) * self._most, np.uint8)  # [bytes]
        self._room = np.empty((experts, PIECE), np.float32)  # [N, n]

    def __call__(self, infos: Sequence[TensorInfo], span: Span, out: NDArray[np.float64]) -> None:
        """Add one span's inner products to the upper half of ``out [N, N]``."""
        code = span.entry.base.code
        bits, add = np.dtype(_BITS[code]), self._add[code]
        cols = span.entry.base.cols
        for first in range(span.first * cols, span.last * cols, self._most):
            size = (min(first + self._most, span.last * cols) - first) * bits.itemsize
            raw = self._raw[: len(infos) * size].reshape(
                len(infos), size
            )  # without gaps: the kernel is compiled for that
            for info, row in zip(infos, raw, strict=True):
                self._reader.fill(info, first * bits.itemsize, row.data)
            add(raw.view(bits), self._room, out)
