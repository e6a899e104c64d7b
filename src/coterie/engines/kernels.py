"""The arithmetic of the CPU decoder, compiled by numba: matrix products, attention, norms, for rows of float32.

A row is computed by the same instructions in the same order whatever lies beside it, so its numbers do not depend on its
neighbours, to the last bit. What is written in LLVM's instructions is in :mod:`coterie.engines.emit`.

Sizes: R rows, d width, H query heads, Hkv key/value heads, D head width, f MLP width, V vocabulary, L layers. ``n'`` is n
rounded up to the lanes that are written at once; what lies in between is never read.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.compiling import compiled, part
from coterie.engines import emit
from coterie.engines.emit import COLUMNS, LANES, ROWS, few_1, few_2, few_3, few_4, gate, keep, rotate, softmax, tile
from coterie.engines.emit import address as _at

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


class Model(NamedTuple):
    """Weights. Matrices lie in panels of ``COLUMNS`` outputs [L, out' / COLUMNS, in, COLUMNS]; biases are [L, out'], or empty."""

    embedding: F32  # [V, d]
    attention_norm: F32  # [L, d]
    qkv: F32  # [L, panels, d, COLUMNS] -> q [H D], k [Hkv D], v [Hkv D]
    qkv_bias: F32
    query_norm: F32  # [L, D], or empty
    key_norm: F32
    out: F32  # [L, panels, H D, COLUMNS]
    out_bias: F32
    mlp_norm: F32  # [L, d]
    gate_up: F32  # [L, panels, d, COLUMNS] -> gate [f'], up [f']
    gate_up_bias: F32
    down: F32  # [L, panels, f, COLUMNS]
    down_bias: F32
    norm: F32  # [d]
    head: F32  # [1, panels, d, COLUMNS] -> [V']
    head_bias: F32
    heads: int
    eps: float


class Cache(NamedTuple):
    """Keys and values of P prompts and, by slot, of rows' own tokens, with room for T' tokens each (multiples of ``LANES``).

    Keys are flat [L, P or slots, Hkv, T' / LANES, D, LANES]: panels of positions; values flat [L, P or slots, Hkv, T', D'].
    """

    prompt_keys: F32
    prompt_values: F32
    prompt_room: int  # T'
    prompt_length: I64  # [P]
    own_keys: F32
    own_values: F32
    own_room: int
    slots: int
    kv_heads: int
    cos: F32  # [T, D / 2] by position
    sin: F32


class Scratch(NamedTuple):
    """What a thread works in. Rows are computed in multiples of ``ROWS``: spare ones are computed and not looked at."""

    x: F32  # [R, d] the residual stream
    normed: F32  # [R, d]
    qkv: F32  # [R, (H + 2 Hkv) D and spare]
    mixed: F32  # [R + 1, H D] what attention gives; written D' at a time, so there is a row to spare
    change: F32  # [R, d'] what is added to x
    gate_up: F32  # [R, 2 f']
    scores: F32  # [H / Hkv, T' + T'] a head's own


# numba compiles again when the file of a function has changed; here, also when the emitted instructions have
_compiled = partial(compiled, depends=emit.__file__)


@_compiled
def _matmul(x: F32, rows: int, w: F32, layer: int, bias: F32, out: F32) -> None:
    """``x [R, >= in]`` times ``w [L, panels, in, COLUMNS]`` of a layer, plus its bias, into ``out [R, >= out']``."""
    padded = (rows + ROWS - 1) // ROWS * ROWS
    panels, k = w.shape[1], w.shape[2]
    size = k * COLUMNS
    step = COLUMNS * ROWS // padded
    for j in range(panels):
        this = (layer * panels + j) * size
        for r in range(0, padded, ROWS):
            ahead = _at(w, this + size + r // ROWS * k * step)
            row, place = _at(x, r * x.shape[1]), _at(out, r * out.shape[1] + j * COLUMNS)
            tile(row, x.shape[1], _at(w, this), COLUMNS, k, place, out.shape[1], ahead, 4 * step)
    if bias.size:
        for r in range(rows):
            for i in range(bias.shape[1]):
                out[r, i] += bias[layer, i]


@_compiled
def _few(rows: int, a: int, lda: int, b: int, ldb: int, k: int, c: int, ldc: int, more: int) -> None:
    """``c [rows, LANES] = a [rows, k] @ b [k, LANES]``, or added to c with ``more`` = 1: addresses, distances of rows."""
    while rows > 4:
        few_4(a, lda, b, ldb, k, c, ldc, more, 0)
        rows, a, c = rows - 4, a + 16 * lda, c + 16 * ldc
    if rows == 1:
        few_1(a, lda, b, ldb, k, c, ldc, more, 0)
    elif rows == 2:
        few_2(a, lda, b, ldb, k, c, ldc, more, 0)
    elif rows == 3:
        few_3(a, lda, b, ldb, k, c, ldc, more, 0)
    else:
        few_4(a, lda, b, ldb, k, c, ldc, more, 0)


@_compiled
def _norm(x: F32, rows: int, weight: F32, eps: float, out: F32) -> None:
    """RMSNorm of ``x [R, d]``."""
    for r in range(rows):
        total = np.float32(0.0)
        for i in range(weight.shape[0]):
            total += x[r, i] * x[r, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(weight.shape[0]) + np.float32(eps))
        for i in range(weight.shape[0]):
            out[r, i] = x[r, i] * scale * weight[i]


@_compiled
def _turn(m: Model, cache: Cache, layer: int, qkv: F32, r: int, position: int) -> None:
    """Qwen3's norms, then rotary embedding, of the queries and keys in one row, in place."""
    half = cache.cos.shape[1]
    for h in range(m.heads + cache.kv_heads):
        first = h * 2 * half
        if m.query_norm.size:
            weight = m.query_norm[layer] if h < m.heads else m.key_norm[layer]
            total = np.float32(0.0)
            for i in range(2 * half):
                total += qkv[r, first + i] * qkv[r, first + i]
            scale = np.float32(1.0) / np.sqrt(total / np.float32(2 * half) + np.float32(m.eps))
            for i in range(2 * half):
                qkv[r, first + i] *= scale * weight[i]
        start = _at(qkv, r * qkv.shape[1] + first)
        rotate(start, _at(cache.cos, position * half), _at(cache.sin, position * half), half)


@part
def _attend(
    m: Model, cache: Cache, s: Scratch, layer: int, r: int, prompt: int, before: int, slot: int, own: int
) -> None:
    """Row ``r`` attends to the first ``before`` tokens of its prompt and the first ``own`` of its slot; into ``s.mixed[r]``.

    Its key and value are stored first: in its slot, or with ``own`` = 0 in the prompt.
    """
    head_dim, wide = 2 * cache.cos.shape[1], s.scores.shape[1]
    lanes = (head_dim + LANES - 1) // LANES * LANES
    group, prompts = m.heads // cache.kv_heads, cache.prompt_length.shape[0]
    middle = (before + LANES - 1) // LANES * LANES
    end = middle + (own + LANES - 1) // LANES * LANES
    scores, queries, outs = _at(s.scores, 0), _at(s.qkv, r * s.qkv.shape[1]), _at(s.mixed, r * s.mixed.shape[1])
    none, one = own - own, own - own + 1  # literals would each have the callee compiled once more
    for h in range(cache.kv_heads):
        q, out = queries + 4 * h * group * head_dim, outs + 4 * h * group * head_dim
        k, v = queries + 4 * (m.heads + h) * head_dim, queries + 4 * (m.heads + cache.kv_heads + h) * head_dim
        theirs = ((layer * prompts + prompt) * cache.kv_heads + h) * cache.prompt_room
        mine = ((layer * cache.slots + slot) * cache.kv_heads + h) * cache.own_room
        place = mine + own - 1 if own > 0 else theirs + before - 1
        panel, lane = place // LANES * LANES * head_dim, place % LANES  # rooms are multiples of LANES
        if own > 0:
            keep(k, v, _at(cache.own_keys, panel + lane), _at(cache.own_values, place * lanes), head_dim)
        else:
            keep(k, v, _at(cache.prompt_keys, panel + lane), _at(cache.prompt_values, place * lanes), head_dim)
        for t in range(0, middle, LANES):
            keys = _at(cache.prompt_keys, (theirs + t) * head_dim)
            _few(group, q, head_dim, keys, LANES, head_dim, scores + 4 * t, wide, none)
        for t in range(middle, end, LANES):
            keys = _at(cache.own_keys, (mine + t - middle) * head_dim)
            _few(group, q, head_dim, keys, LANES, head_dim, scores + 4 * t, wide, none)
        for g in range(group):
            softmax(scores + 4 * g * wide, end, before, middle, middle + own)
        for c in range(lanes - LANES, -1, -LANES):  # backwards: what spills over the end of a head is then replaced
            values = _at(cache.prompt_values, theirs * lanes + c)
            _few(group, scores, wide, values, lanes, before, out + 4 * c, head_dim, none)
            if own > 0:
                values = _at(cache.own_values, mine * lanes + c)
                _few(group, scores + 4 * middle, wide, values, lanes, own, out + 4 * c, head_dim, one)


@_compiled
def _add(x: F32, rows: int, change: F32) -> None:
    for r in range(rows):
        for i in range(x.shape[1]):
            x[r, i] += change[r, i]


@_compiled
def run(m: Model, cache: Cache, s: Scratch, token: I64, prompt: I64, slot: I64, position: I64) -> None:
    """All layers over rows with one new token each; the normed hidden states are left in ``s.normed``.

    Row r continues ``prompt[r]`` in its ``slot[r]``; with slot -1 it is itself a token of that prompt, and the tokens before
    it have been computed, or are rows before r.
    """
    rows = len(token)
    for r in range(rows):
        for i in range(m.embedding.shape[1]):
            s.x[r, i] = m.embedding[token[r], i]
    for layer in range(m.attention_norm.shape[0]):
        _norm(s.x, rows, m.attention_norm[layer], m.eps, s.normed)
        _matmul(s.normed, rows, m.qkv, layer, m.qkv_bias, s.qkv)
        for r in range(rows):
            at, p = position[r], prompt[r]
            _turn(m, cache, layer, s.qkv, r, at)
            before = cache.prompt_length[p] if slot[r] >= 0 else at + 1
            _attend(m, cache, s, layer, r, p, before, slot[r], at + 1 - before)
        _matmul(s.mixed, rows, m.out, layer, m.out_bias, s.change)
        _add(s.x, rows, s.change)
        _norm(s.x, rows, m.mlp_norm[layer], m.eps, s.normed)
        _matmul(s.normed, rows, m.gate_up, layer, m.gate_up_bias, s.gate_up)
        half = s.gate_up.shape[1] // 2
        for r in range(rows):
            gate(_at(s.gate_up, 2 * r * half), _at(s.gate_up, (2 * r + 1) * half), half)
        _matmul(s.gate_up, rows, m.down, layer, m.down_bias, s.change)
        _add(s.x, rows, s.change)
    _norm(s.x, rows, m.norm, m.eps, s.normed)


@_compiled
def head(m: Model, hidden: F32, rows: int, logits: F32) -> None:
    """``hidden [R, d]`` -> ``logits [R, V']``, both with room for a multiple of ``ROWS``."""
    _matmul(hidden, rows, m.head, m.head.shape[0] - 1, m.head_bias, logits)
