"""Deltas, streamed: row blocks of the base and of every expert's difference from it, in fp32 whatever was stored.

A thread reads and converts the next blocks while this one is worked on. Memory is a few blocks, held under a budget in MiB
whatever the size of the model and the number of experts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from coterie.merging.adapters import Pair
from coterie.merging.checkpoints import Reader
from coterie.merging.inputs import Entry, Full, Inputs, Source
from coterie.merging.recipe import ComputeDtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_AHEAD = 4  # blocks read ahead
_MOST = 1 << 17  # values of a block: larger ones fall out of the processor's cache


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``first:last`` of one tensor."""

    entry: Entry
    first: int
    last: int
    base: Tensor  # [r, cols] compute dtype (buffers: as stored)
    deltas: Tensor  # [N, r, cols] compute dtype (buffers: the experts' values)


_Item = tuple[Block, list[int]]  # a block, and the experts whose weights stand where their deltas belong


def block_values(budget_mib: int, experts: int) -> int:
    """Values per block so that all blocks in flight fit the budget: those made ahead, and working copies."""
    ahead, working = (_AHEAD + 2) * (experts + 1) * 4, 8 * 4
    return min(_MOST, max(4096, (budget_mib << 20) // (ahead + working)))


def row_blocks(start: int, end: int, cols: int, values: int) -> list[tuple[int, int]]:
    """Rows ``start:end`` in pieces of about ``values`` values."""
    step = max(1, values // max(1, cols))
    return [(r, min(r + step, end)) for r in range(start, end, step)]


def stream(
    inputs: Inputs,
    entries: Sequence[Entry],
    budget_mib: int,
    compute_dtype: ComputeDtype = "float32",
    only: Sequence[int] | None = None,
) -> Iterator[Block]:
    """All row blocks of ``entries`` in order. ``only``: indices of the experts to read (default all).

    A block's tensors are overwritten once the next block has been asked for: fresh memory for each would cost more time
    (page faults) than the arithmetic.
    """
    who = range(len(inputs.experts)) if only is None else only
    values = block_values(budget_mib, len(who))
    spans = [Span(e, 0, e.base.rows) for e in entries]
    # the base is taken off here, not in the reader: reading is the longer half of the work
    for item in _read_ahead(lambda reader: _blocks(reader, spans, who, values, compute_dtype, _AHEAD + 2)):
        yield _without_base(item)


class Span(NamedTuple):
    """Rows ``first:last`` of a tensor."""

    entry: Entry
    first: int
    last: int


def blocks_of(inputs: Inputs, span: Span, values: int, reader: Reader) -> Iterator[Block]:
    """The blocks of one span in fp32, all work in this thread: for callers that share the work between threads themselves.
    A block is overwritten once the next has been asked for."""
    for item in _blocks(reader, [span], range(len(inputs.experts)), values, "float32", 1):
        yield _without_base(item)


def _without_base(item: _Item) -> Block:
    block, whole = item
    if whole and block.entry.merged:
        if len(whole) == len(block.deltas):
            block.deltas.sub_(block.base)
        else:
            for k in whole:
                block.deltas[k].sub_(block.base)
    return block


class _Factors(NamedTuple):
    left: Tensor  # [r, rank]
    right: Tensor  # [rank, cols]


class _Matched(NamedTuple):
    """Vocabulary rows matched by token text; rows the expert lacks keep the base's values."""

    rows: Tensor  # [k, cols] as stored
    known: Tensor  # [r] bool, k of them true


def _fill(raw: Tensor | _Factors | _Matched | None, base: Tensor, out: Tensor) -> bool:
    """One expert's difference from the base into ``out [r, cols]``. True: ``out`` holds its weights, the base still in them."""
    import torch

    if isinstance(raw, torch.Tensor):
        out.copy_(raw)
        return True
    if not base.is_floating_point():
        out.copy_(base)
    elif raw is None:
        out.zero_()
    elif isinstance(raw, _Matched):
        out.zero_()
        out[raw.known] = raw.rows.to(base.dtype) - base[raw.known]
    else:
        torch.matmul(raw.left.to(base.dtype), raw.right.to(base.dtype), out=out)
    return False


def _read_ahead(blocks: Callable[[Reader], Iterator[_Item]]) -> Iterator[_Item]:
    """Blocks made by a thread that stays ``_AHEAD`` in front. Its errors are raised here; it ends when this generator does."""
    ready: queue.Queue[_Item | BaseException | None] = queue.Queue(_AHEAD)
    stop = threading.Event()

    def put(item: _Item | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def read() -> None:
        try:
            with Reader() as reader:
                for block in blocks(reader):
                    if not put(block):
                        return
            put(None)
        except BaseException as e:  # handed to the consumer, who raises it
            put(e)

    thread = threading.Thread(target=read, name="coterie-merge-reader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def _blocks(
    reader: Reader, spans: Sequence[Span], who: Sequence[int], values: int, compute_dtype: ComputeDtype, buffers: int
) -> Iterator[_Item]:
    import torch

    dtype: torch.dtype = getattr(torch, compute_dtype)
    ring = [torch.empty(0) for _ in range(buffers)]  # in the queue, in the reader's hand, in the consumer's
    count = 0
    for entry, start, end in spans:
        factors = {i: s.factors(reader) for i in who if isinstance(s := entry.sources[i], Pair)}
        for first, last in row_blocks(start, end, entry.base.cols, values):
            stored = reader.rows(entry.base, first, last, reuse=True)
            kind = dtype if entry.merged else stored.dtype
            slot, size = count % len(ring), (len(who) + 1) * stored.numel()
            if ring[slot].numel() < size or ring[slot].dtype != kind:
                ring[slot] = torch.empty(size, dtype=kind)
            room = ring[slot][:size].view(len(who) + 1, *stored.shape)  # [1 + N, r, cols]
            base, deltas = room[0].copy_(stored), room[1:]
            whole = []
            for k, i in enumerate(who):
                if i in factors:
                    raw: Tensor | _Factors | _Matched | None = _Factors(factors[i][0][first:last], factors[i][1])
                else:
                    raw = _raw(reader, entry.sources[i], first, last)
                if _fill(raw, base, deltas[k]):
                    whole.append(k)
            yield Block(entry, first, last, base, deltas), whole
            count += 1


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Reader and consumer keep one core busy each; torch's own threads would wait for each other on such small blocks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _raw(reader: Reader, source: Source, first: int, last: int) -> Tensor | _Matched | None:
    import torch

    if source is None:
        return None
    assert isinstance(source, Full)
    if source.rows is None:
        return reader.rows(source.info, first, last, reuse=True)
    wanted = source.rows.rows[first:last]
    known = torch.tensor([r >= 0 for r in wanted])  # [r]
    if not known.any():
        return None
    return _Matched(reader.gather(source.info, [r for r in wanted if r >= 0]), known)
