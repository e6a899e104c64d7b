"""Inner products of deltas, exactly: fp32 products summed within rows or pieces of 4096 values, fp64 across them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from coterie.merging.checkpoints import PLAIN, Reader, TensorInfo
from coterie.merging.deltas import Span, blocks_of, one_thread_each, row_blocks
from coterie.merging.inputs import Entry, Full, Inputs

_PIECE = 4096
_SPAN = 1 << 19  # values that a thread takes and reads at once
_CACHED = 1 << 16  # values that are converted and multiplied at once: N + 1 of them stay in a core's cache


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


def gram_pass(inputs: Inputs, chunk_mib: int = 64, threads: int = 0) -> Tensor:
    """``[N, N]`` inner products of all deltas over all merged values, in one pass over the files.

    Norms, cosines, and the norm of any weighted sum follow from it: ``|sum_i w_i d_i|^2 = w^T G w``. ``threads`` (0: one per
    core) each read, convert and multiply their own pieces; the sum runs in the order of the pieces, whoever made them.
    """
    workers, n = threads or os.cpu_count() or 1, len(inputs.experts)
    values = min(_SPAN, max(4096, (chunk_mib << 20) // (workers * 8 * (n + 1))))
    spans = [
        Span(e, first, last)
        for e in inputs.entries
        if e.merged
        for first, last in row_blocks(0, e.base.rows, e.base.cols, values)
    ]
    shared = iter(enumerate(spans))
    parts = torch.zeros(len(spans), n, n, dtype=torch.float64)  # [spans, N, N]

    def work(_: int) -> None:
        with Reader() as reader:
            plain = _Plain(reader, n)
            for at, span in shared:  # each thread takes the next that nobody has taken
                infos = plain_infos(span.entry)
                if infos is not None:
                    parts[at] = plain(infos, span)
                    continue
                for block in blocks_of(inputs, span, values, reader):
                    parts[at] += block_gram(block.deltas.flatten(1))

    with one_thread_each(), ThreadPoolExecutor(workers, "coterie-gram") as pool:
        list(pool.map(work, range(workers)))
    return parts.sum(0)


def plain_infos(entry: Entry) -> list[TensorInfo] | None:
    """The base's and the experts' tensors where all are stored in one type and in one order; else None."""
    infos = [entry.base]
    for s in entry.sources:
        if not isinstance(s, Full) or s.rows is not None or s.info.code != entry.base.code:
            return None
        infos.append(s.info)
    return infos


class _Plain:
    """Spans of tensors stored alike: read at once, then worked on in pieces that stay in the cache."""

    def __init__(self, reader: Reader, experts: int) -> None:
        self._reader, self._experts = reader, experts
        self._raw = np.empty((experts + 1, 0), np.uint8)  # [1 + N, bytes]
        self._room = torch.empty(experts + 1, _CACHED)  # [1 + N, n]
        self._rows = self._room[1:].view(experts, -1, _PIECE).transpose(0, 1)  # [n / piece, N, piece]
        self._grams = torch.empty(0, 1, experts, experts)  # [pieces, n / piece, N, N]

    def __call__(self, infos: Sequence[TensorInfo], span: Span) -> Tensor:
        """``[N, N]`` of one span, fp64."""
        dtype: torch.dtype = getattr(torch, PLAIN[span.entry.base.code])
        width = span.entry.base.cols * dtype.itemsize
        size = (span.last - span.first) * width
        if self._raw.shape[1] < size:
            self._raw = np.empty((self._experts + 1, size), np.uint8)
        for info, row in zip(infos, self._raw, strict=True):
            self._reader.fill(info, span.first * width, row[:size].data)
        raw = torch.from_numpy(self._raw[:, :size]).view(dtype)  # [1 + N, values]
        whole, base, deltas = raw.shape[1] // _CACHED, self._room[0], self._room[1:]
        if len(self._grams) < whole:
            self._grams = torch.empty(whole, _CACHED // _PIECE, self._experts, self._experts)
        for k in range(whole):  # few calls: each costs as much as some thousand products
            self._room.copy_(raw[:, k * _CACHED : (k + 1) * _CACHED])
            deltas.sub_(base)
            torch.bmm(self._rows, self._rows.transpose(1, 2), out=self._grams[k])
        rest = raw[:, whole * _CACHED :].float()  # [1 + N, < n]
        return self._grams[:whole].double().sum((0, 1)) + block_gram(rest[1:] - rest[0])  # [N, N]
