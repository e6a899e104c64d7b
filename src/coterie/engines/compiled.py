"""The fast decoder for Llama-family models in float32 on a CPU: one compiled call a step (:mod:`coterie.engines.kernels`).

Prompts are computed and stored once for all samples of them. A row owns a slot for the keys and values of its own tokens
and keeps it while it is moved among the rows, so nothing is copied when others leave. With several threads, each computes
some of the rows through all layers; a row's numbers depend neither on the split nor on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.engines import kernels
from coterie.engines.emit import COLUMNS, LANES, ROWS
from coterie.engines.kernels import F32, I64, Cache, Model, Scratch
from coterie.engines.weights import Linear, Rotary, Weights

_TOKENS = 128  # tokens of prompts computed at once
_SHARE = 20e6  # floating-point operations worth handing to another thread


@dataclass(frozen=True)
class Packed:
    """Weights laid out for the kernels; a copy, but for the embedding."""

    model: Model
    kv_heads: int
    head_dim: int
    rotary: Rotary


def packable(w: Weights) -> bool:
    return w.device.type == "cpu" and w.dtype == w.embedding.dtype == torch.float32


@torch.no_grad()
def pack(w: Weights) -> Packed:
    """Lay out weights in float32 on a CPU, layer by layer."""
    layers = w.layers
    model = Model(
        embedding=w.embedding.contiguous().numpy(),
        attention_norm=_stack([x.attention_norm for x in layers]),
        qkv=_panels([x.qkv for x in layers]),
        qkv_bias=_biases([x.qkv for x in layers]),
        query_norm=_stack([x.query_norm for x in layers if x.query_norm is not None]),
        key_norm=_stack([x.key_norm for x in layers if x.key_norm is not None]),
        out=_panels([x.out for x in layers]),
        out_bias=_biases([x.out for x in layers]),
        mlp_norm=_stack([x.mlp_norm for x in layers]),
        gate_up=_panels([x.gate for x in layers], [x.up for x in layers]),
        gate_up_bias=_biases([x.gate for x in layers], [x.up for x in layers]),
        down=_panels([x.down for x in layers]),
        down_bias=_biases([x.down for x in layers]),
        norm=w.norm.numpy(),
        head=_panels([w.head]),
        head_bias=_biases([w.head]),
        heads=w.heads,
        eps=w.eps,
    )
    return Packed(model, w.kv_heads, w.head_dim, w.rotary)


def _stack(vectors: list[Tensor]) -> F32:
    """[L, n], or an empty array if there are none."""
    return torch.stack(vectors).float().numpy() if vectors else np.empty((0, 0), np.float32)


def _panels(*parts: list[Linear]) -> F32:
    """The weights [out, in] of each layer, panels of several kinds one after the other: [L, panels, in, COLUMNS]."""
    inner = parts[0][0][0].shape[1]
    counts = [_ceil(part[0][0].shape[0], COLUMNS) // COLUMNS for part in parts]
    packed = torch.empty(len(parts[0]), sum(counts), inner, COLUMNS)
    for i, linears in enumerate(zip(*parts, strict=True)):
        for into, (weight, _) in zip(
            packed[i].split_with_sizes(counts), linears, strict=True
        ):  # [panels, in, COLUMNS], [out, in]
            spare = -weight.shape[0] % COLUMNS
            whole = torch.nn.functional.pad(weight, (0, 0, 0, spare)) if spare else weight  # [out', in]
            into.copy_(whole.view(-1, COLUMNS, inner).transpose(1, 2))
    return packed.numpy()


def _biases(*parts: list[Linear]) -> F32:
    """Biases beside each other as :func:`_panels` lays out their weights, [L, out']; empty if no layer has one."""
    if all(bias is None for part in parts for _, bias in part):
        return np.empty((0, 0), np.float32)
    rows = [[_padded(*linear) for linear in linears] for linears in zip(*parts, strict=True)]
    return torch.stack([torch.cat(row) for row in rows]).numpy()


def _padded(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A layer's bias, or zeros: [out']"""
    out = torch.zeros(_ceil(weight.shape[0], COLUMNS))
    if bias is not None:
        out[: len(bias)] = bias
    return out


def _ceil(count: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-count // step) * step


class CompiledDecoder:
    """One wave of rows. Memory for ``max_new_tokens`` per row is reserved, and used as rows grow."""

    shares_prompt = True

    def __init__(self, packed: Packed) -> None:
        self.w, self.m = packed, packed.model
        m = self.m
        self.operations = 2 * sum(x.size for x in (m.qkv, m.out, m.gate_up, m.down, m.head))  # of one row
        self.threads = torch.get_num_threads()
        self.helpers = ThreadPoolExecutor(self.threads - 1) if self.threads > 1 else None

    def prefill(self, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int) -> Tensor:
        """Run the prompts; row ``r`` continues ``prompts[owner[r]]``. Returns next-token logits [R, V]."""
        self.cache = self._cache(list(map(len, prompts)), len(owner), max_new_tokens)
        self.prompt = np.array(owner, np.int64)  # [R]
        self.slot = np.arange(len(owner))  # [R]
        self.position = self.cache.prompt_length[self.prompt]  # [R]
        rows = _ceil(len(owner), ROWS)
        self.scratch = [self._scratch(max(_TOKENS, rows)) for _ in range(self.threads)]
        self.logits = np.empty((rows, _columns(self.m.head)), np.float32)  # [R', V']
        last = np.zeros((_ceil(len(prompts), ROWS), self.m.embedding.shape[1]), np.float32)  # [P', d]
        tokens = sum(map(len, prompts))
        parts = self._parts(len(prompts), tokens * self.operations // len(prompts), 1)
        self._together(self._prompts, prompts, last, parts=parts)
        logits = np.empty((len(last), self.logits.shape[1]), np.float32)  # [P', V']
        kernels.head(self.m, last, len(prompts), logits)
        return torch.from_numpy(logits[: len(prompts), : self.m.embedding.shape[0]][self.prompt])  # [R, V]

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens [R]`` to the rows; returns the logits [R, V] of what follows, in memory used again by the next step."""
        token = tokens.numpy()  # [R]
        parts = self._parts(len(token), self.operations, ROWS)
        self._together(self._step, token, parts=parts)
        self.position += 1
        return torch.from_numpy(self.logits)[: len(token), : self.m.embedding.shape[0]]  # [R, V]

    def keep(self, order: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``order[i]`` was; the others leave."""
        rows = np.array(order, np.int64)
        self.prompt, self.slot, self.position = self.prompt[rows], self.slot[rows], self.position[rows]

    def _step(self, token: I64, first: int, last: int, thread: int) -> None:
        rows = slice(first, last)
        state = (token[rows], self.prompt[rows], self.slot[rows], self.position[rows])
        kernels.run(self.m, self.cache, self.scratch[thread], *state)
        kernels.head(self.m, self.scratch[thread].normed, last - first, self.logits[first:])

    def _prompts(self, prompts: Sequence[Sequence[int]], last: F32, first: int, end: int, thread: int) -> None:
        """Compute the prompts from ``first`` to ``end``, laid end to end, some tokens at a time.

        The last hidden state of each goes to ``last``.
        """
        scratch = self.scratch[thread]
        which = range(first, end)
        token = np.array([t for i in which for t in prompts[i]], np.int64)  # [N]
        prompt = np.repeat(np.array(which, np.int64), [len(prompts[i]) for i in which])  # [N]
        position = np.concatenate([np.arange(len(prompts[i])) for i in which])  # [N]
        for at in range(0, len(token), _TOKENS):
            now = slice(at, at + _TOKENS)
            none = np.full(len(token[now]), -1, np.int64)
            kernels.run(self.m, self.cache, scratch, token[now], prompt[now], none, position[now])
            done = np.flatnonzero(position[now] + 1 == self.cache.prompt_length[prompt[now]])
            last[prompt[now][done]] = scratch.normed[done]

    def _parts(self, count: int, operations: int, unit: int) -> list[tuple[int, int]]:
        """Cut ``count`` things of so many operations each into at most a part per thread, in whole units."""
        parts = min(self.threads, -(-count // unit), max(1, int(count * operations // _SHARE)))
        size = _ceil(-(-count // parts), unit)
        return [(a, min(a + size, count)) for a in range(0, count, size)]

    def _together(self, work: Callable[..., None], *common: Any, parts: Sequence[tuple[int, int]]) -> None:
        """Run ``work`` on every part, each in a thread with scratch memory of its own."""
        others = (
            [self.helpers.submit(work, *common, *part, k + 1) for k, part in enumerate(parts[1:])]
            if self.helpers
            else []
        )
        work(*common, *parts[0], 0)
        for other in others:
            other.result()

    def _cache(self, lengths: list[int], rows: int, max_new_tokens: int) -> Cache:
        layers, heads, dim = len(self.m.attention_norm), self.w.kv_heads, self.w.head_dim
        angles = self.w.rotary.angles(max(lengths) + max_new_tokens)  # [T, D / 2]

        def room(owners: int, tokens: int) -> tuple[F32, F32, int]:
            held = (-(-tokens // LANES) | 1) * LANES  # an odd number of panels: powers of two would share cache sets
            each = layers * owners * heads * held
            # From torch: numpy asks for pages of 2 MiB, and then room that no token comes to takes memory too.
            keys, values = torch.empty(each * dim), torch.empty(each * _ceil(dim, LANES))
            return keys.numpy(), values.numpy(), held

        cos, sin = np.ascontiguousarray(angles.real.numpy()), np.ascontiguousarray(angles.imag.numpy())
        theirs, mine = room(len(lengths), max(lengths)), room(rows, max_new_tokens)
        return Cache(*theirs, np.array(lengths, np.int64), *mine, rows, heads, cos, sin)

    def _scratch(self, rows: int) -> Scratch:
        m, cache = self.m, self.cache
        width, group = m.embedding.shape[1], m.heads // self.w.kv_heads
        sizes = [(rows, width), (rows, width), (rows, _columns(m.qkv)), (rows + 1, m.heads * self.w.head_dim),
                 (rows, _columns(m.down)), (rows, _columns(m.gate_up)), (group, cache.prompt_room + cache.own_room)]  # fmt: skip
        return Scratch(*(np.zeros(size, np.float32) for size in sizes))


def _columns(weights: F32) -> int:
    """Outputs of [L, panels, in, COLUMNS]"""
    return int(weights.shape[1]) * COLUMNS
