"""The arithmetic of the CPU decoder, compiled by numba: matrix products, attention, norms, for rows of float32.

A row is computed by the same instructions in the same order whatever lies beside it, so its numbers do not depend on its
neighbours, to the last bit. Everything is in this one file because numba's cache of compiled code (``__pycache__``) notices
changes of the file that holds a function, not of functions called from it.

Sizes: R rows, d width, H query heads, Hkv key/value heads, D head width, f MLP width, V vocabulary, L layers. ``n'`` is n
rounded up to the lanes that are written at once; what lies in between is never read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

LANES = 16  # keys scored at once, and columns of a product of attention: one AVX-512 register, two or four of others
_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
ROWS, COLUMNS = (8, 32) if _WIDE else (4, 16)  # a tile of a matrix product: as many sums as fit in registers


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


_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _emitted(result: Any, takes: int, emit: Callable[[Any, list[Any]], Any]) -> Any:
    """A compiled function of ``takes`` int64 numbers (addresses among them) whose instructions ``emit`` writes."""

    def typed(typing: Any, *arguments: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, values)
            return context.get_dummy_value() if value is None else value

        return result(*[types.int64] * takes), write

    names = ", ".join(f"a{i}" for i in range(takes))  # numba wants as many names as there are arguments
    return intrinsic(eval(f"lambda typing, {names}: typed(typing, {names})", {"typed": typed}))


def _call(b: Any, name: str, *arguments: Any) -> Any:
    """An operation of LLVM's own, on numbers or vectors of them."""
    kind = arguments[0].type
    full = f"llvm.{name}.v{LANES}f32" if kind == _VECTOR else f"llvm.{name}.f32"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * len(arguments)), full)
    return b.call(function, arguments)


def _everywhere(b: Any, number: Any) -> Any:
    """A vector of one number."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(nothing, number, _INT(0)), nothing, ir.VectorType(_INT, LANES)([0] * LANES)
    )


def _vector_at(b: Any, address: Any, index: Any, offset: int = 0) -> Any:
    """Pointer to the vector that starts ``index + offset`` floats on from an address."""
    floats = b.gep(b.inttoptr(address, _FLOAT.as_pointer()), [b.add(index, _LONG(offset))])
    return b.bitcast(floats, _VECTOR.as_pointer())


def _product(rows: int, vectors: int, sums: int, weights: bool) -> Any:
    """``c[rows, 16 vectors] = a[rows, k] @ b[k, 16 vectors]`` whose sums stay in registers.

    Takes (a, lda, b, ldb, k, c, ldc, more, step): addresses and distances of rows. ``sums`` partial sums over k run side by
    side: a product of few rows waits for its own results otherwise. ``more`` = 1 adds to c instead of replacing it; if b are
    ``weights``, more and step say instead that each k asks for the memory at ``more + step * k``, in the next panel, so that
    weights stream in while the current panel is used.
    """

    def emit(b: Any, values: list[Any]) -> None:
        a_at, lda, b_at, ldb, k, c_at, ldc, more, step = values
        a_rows = [b.gep(b.inttoptr(a_at, _FLOAT.as_pointer()), [b.mul(_LONG(m), lda)]) for m in range(rows)]
        tile = [(m, v) for m in range(rows) for v in range(vectors)]
        zero = _constant(0.0)
        sum_of = [{mv: cgutils.alloca_once_value(b, zero) for mv in tile} for _ in range(sums)]

        def add(i: Any, s: int) -> None:
            if weights:
                byte = ir.IntType(8).as_pointer()
                fetch = cgutils.get_or_insert_function(
                    b.module, ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT]), "llvm.prefetch.p0"
                )
                there = b.inttoptr(b.add(more, b.mul(i, step)), byte)
                b.call(fetch, [there, _INT(0), _INT(3), _INT(1)])  # to read, into the nearest cache
            columns = [b.load(_vector_at(b, b_at, b.mul(i, ldb), LANES * v), align=4) for v in range(vectors)]
            for m in range(rows):
                one = _everywhere(b, b.load(b.gep(a_rows[m], [i])))
                for v in range(vectors):
                    b.store(_call(b, "fma", one, columns[v], b.load(sum_of[s][m, v])), sum_of[s][m, v])

        whole = b.sub(k, b.srem(k, _LONG(sums)))
        with cgutils.for_range_slice(b, _LONG(0), whole, _LONG(sums), _LONG) as (i, _):
            for s in range(sums):
                add(b.add(i, _LONG(s)), s)
        if sums > 1:
            with cgutils.for_range_slice(b, whole, k, _LONG(1), _LONG) as (i, _):
                add(i, 0)
        places = {(m, v): _vector_at(b, c_at, b.mul(_LONG(m), ldc), LANES * v) for m, v in tile}
        totals = {}
        for mv in tile:
            totals[mv] = b.load(sum_of[0][mv])
            for s in range(1, sums):
                totals[mv] = b.fadd(totals[mv], b.load(sum_of[s][mv]))
        if not weights:
            with b.if_then(b.icmp_signed("!=", more, _LONG(0))):
                for mv in tile:
                    b.store(b.load(places[mv], align=4), sum_of[0][mv])
            with b.if_then(b.icmp_signed("==", more, _LONG(0))):
                for mv in tile:
                    b.store(zero, sum_of[0][mv])
            totals = {mv: b.fadd(totals[mv], b.load(sum_of[0][mv])) for mv in tile}
        for mv in tile:  # after all loads, since rows of c may overlap; the later one counts
            b.store(totals[mv], places[mv], align=4)

    return _emitted(types.void, 9, emit)


def _constant(value: float) -> Any:
    return _VECTOR([value] * LANES)


def _exponential(b: Any, x: Any) -> Any:
    """e ** x for a vector of x <= 0: relative error below 2e-7; 0 below -87; NaN stays NaN."""
    n = _call(b, "floor", _call(b, "fma", x, _constant(1.4426950408889634), _constant(0.5)))
    n = b.select(b.fcmp_ordered(">", n, _constant(-126.0)), n, _constant(-126.0))
    r = _call(b, "fma", n, _constant(-0.693359375), x)  # x - n log 2, in two parts
    r = _call(b, "fma", n, _constant(2.12194440e-4), r)
    p = _constant(1.9875691500e-4)  # the polynomial of Cephes' expf
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _call(b, "fma", p, r, _constant(coefficient))
    p = b.fadd(_call(b, "fma", b.fmul(p, r), r, r), _constant(1.0))
    whole = ir.VectorType(_INT, LANES)
    power = b.shl(b.add(b.fptosi(n, whole), whole([127] * LANES)), whole([23] * LANES))
    return b.select(b.fcmp_ordered("<", x, _constant(-87.0)), _constant(0.0), b.fmul(p, b.bitcast(power, _VECTOR)))


def _address(typing: Any, array: Any, index: Any) -> Any:
    """Address of the float ``index`` places on from the start of an array."""

    def write(context: Any, b: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, values[0]).data
        return b.ptrtoint(b.gep(data, [values[1]]), _LONG)

    return types.int64(array, types.int64), write


_at: Any = intrinsic(_address)


def _softmax_of(b: Any, values: list[Any]) -> None:
    """(address, end, before, middle, last): softmax, in place, of the floats up to ``before`` and from ``middle`` to ``last``.

    ``end`` is the next multiple of LANES; what lies between becomes 0.
    """
    at, end, before, middle, last = values
    longs = ir.VectorType(_LONG, LANES)
    lane = longs(list(range(LANES)))

    def each() -> Any:
        return cgutils.for_range_slice(b, _LONG(0), end, _LONG(LANES), _LONG)

    def spread(number: Any) -> Any:
        nothing = ir.Constant(longs, ir.Undefined)
        return b.shuffle_vector(
            b.insert_element(nothing, number, _INT(0)), nothing, ir.VectorType(_INT, LANES)([0] * LANES)
        )

    def folded(vector: Any, both: Callable[[Any, Any], Any]) -> Any:
        for half in (8, 4, 2, 1):
            order = ir.VectorType(_INT, LANES)([(i + half) % LANES for i in range(LANES)])
            vector = both(vector, b.shuffle_vector(vector, vector, order))
        return vector  # the same number everywhere

    def larger(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    largest = cgutils.alloca_once_value(b, _constant(float("-inf")))
    with each() as (i, _):
        place = b.add(spread(i), lane)
        own = b.and_(b.icmp_signed(">=", place, spread(middle)), b.icmp_signed("<", place, spread(last)))
        counts = b.or_(b.icmp_signed("<", place, spread(before)), own)
        x = b.select(counts, b.load(_vector_at(b, at, i), align=4), _constant(float("-inf")))
        b.store(x, _vector_at(b, at, i), align=4)
        b.store(larger(x, b.load(largest)), largest)
    top = folded(b.load(largest), larger)
    total = cgutils.alloca_once_value(b, _constant(0.0))
    with each() as (i, _):
        e = _exponential(b, b.fsub(b.load(_vector_at(b, at, i), align=4), top))
        b.store(e, _vector_at(b, at, i), align=4)
        b.store(b.fadd(b.load(total), e), total)
    scale = b.fdiv(_constant(1.0), folded(b.load(total), b.fadd))
    with each() as (i, _):
        b.store(b.fmul(b.load(_vector_at(b, at, i), align=4), scale), _vector_at(b, at, i), align=4)


def _gate_of(b: Any, values: list[Any]) -> None:
    """(gate, up, count): gate to silu(gate) * up, for count floats, a multiple of LANES."""
    gate, up, count = values
    one = _constant(1.0)
    with cgutils.for_range_slice(b, _LONG(0), count, _LONG(LANES), _LONG) as (i, _):
        x = b.load(_vector_at(b, gate, i), align=4)
        e = _exponential(b, _call(b, "minnum", x, b.fneg(x)))
        sigmoid = b.fdiv(b.select(b.fcmp_ordered(">=", x, _constant(0.0)), one, e), b.fadd(one, e))
        both = b.fmul(x, b.load(_vector_at(b, up, i), align=4))
        b.store(b.fmul(both, sigmoid), _vector_at(b, gate, i), align=4)


def _rotate_of(b: Any, values: list[Any]) -> None:
    """(x, cos, sin, half): rotary embedding of ``2 half`` floats, each with the one ``half`` on, in place."""
    x, cos, sin, half = values

    def place(address: Any, index: Any, kind: Any) -> Any:
        return b.bitcast(b.gep(b.inttoptr(address, _FLOAT.as_pointer()), [index]), kind.as_pointer())

    whole = b.and_(half, _LONG(-8))
    for lanes, first, last in ((8, _LONG(0), whole), (1, whole, half)):  # vectors of eight, then what is left
        kind = ir.VectorType(_FLOAT, lanes) if lanes > 1 else _FLOAT
        with cgutils.for_range_slice(b, first, last, _LONG(lanes), _LONG) as (i, _):
            one, two = place(x, i, kind), place(x, b.add(i, half), kind)
            u, v = b.load(one, align=4), b.load(two, align=4)
            c, s = b.load(place(cos, i, kind), align=4), b.load(place(sin, i, kind), align=4)
            b.store(b.fsub(b.fmul(u, c), b.fmul(v, s)), one, align=4)
            b.store(b.fadd(b.fmul(v, c), b.fmul(u, s)), two, align=4)


def _keep_of(b: Any, values: list[Any]) -> None:
    """(k, v, key, value, count): copies a key of that many floats to places LANES apart, and a value as it lies."""
    k, v, key, value = (b.inttoptr(a, _FLOAT.as_pointer()) for a in values[:4])
    with cgutils.for_range_slice(b, _LONG(0), values[4], _LONG(1), _LONG) as (i, _):
        b.store(b.load(b.gep(k, [i])), b.gep(key, [b.mul(i, _LONG(LANES))]))
        b.store(b.load(b.gep(v, [i])), b.gep(value, [i]))


_gate = _emitted(types.void, 3, _gate_of)
_softmax = _emitted(types.void, 5, _softmax_of)
_rotate = _emitted(types.void, 4, _rotate_of)
_keep = _emitted(types.void, 5, _keep_of)
_tile = _product(ROWS, COLUMNS // LANES, 1, True)
_few_1, _few_2 = _product(1, 1, 4, False), _product(2, 1, 2, False)
_few_3, _few_4 = _product(3, 1, 2, False), _product(4, 1, 1, False)


# Sums may be regrouped (the same way each time), so that loops use vectors; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, error_model="numpy", cache=True, fastmath=_FAST)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written: compiled in every process
        return njit(nogil=True, error_model="numpy", fastmath=_FAST)(function)


def _part(function: Callable[..., Any]) -> Any:
    """Compiled as part of what calls it."""
    return njit(nogil=True, error_model="numpy", inline="always", fastmath=_FAST)(function)


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
            row, tile = _at(x, r * x.shape[1]), _at(out, r * out.shape[1] + j * COLUMNS)
            _tile(row, x.shape[1], _at(w, this), COLUMNS, k, tile, out.shape[1], ahead, 4 * step)
    if bias.size:
        for r in range(rows):
            for i in range(bias.shape[1]):
                out[r, i] += bias[layer, i]


@_compiled
def _few(rows: int, a: int, lda: int, b: int, ldb: int, k: int, c: int, ldc: int, more: int) -> None:
    """``c [rows, LANES] = a [rows, k] @ b [k, LANES]``, or added to c with ``more`` = 1: addresses, distances of rows."""
    while rows > 4:
        _few_4(a, lda, b, ldb, k, c, ldc, more, 0)
        rows, a, c = rows - 4, a + 16 * lda, c + 16 * ldc
    if rows == 1:
        _few_1(a, lda, b, ldb, k, c, ldc, more, 0)
    elif rows == 2:
        _few_2(a, lda, b, ldb, k, c, ldc, more, 0)
    elif rows == 3:
        _few_3(a, lda, b, ldb, k, c, ldc, more, 0)
    else:
        _few_4(a, lda, b, ldb, k, c, ldc, more, 0)


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
        _rotate(start, _at(cache.cos, position * half), _at(cache.sin, position * half), half)


@_part
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
            _keep(k, v, _at(cache.own_keys, panel + lane), _at(cache.own_values, place * lanes), head_dim)
        else:
            _keep(k, v, _at(cache.prompt_keys, panel + lane), _at(cache.prompt_values, place * lanes), head_dim)
        for t in range(0, middle, LANES):
            keys = _at(cache.prompt_keys, (theirs + t) * head_dim)
            _few(group, q, head_dim, keys, LANES, head_dim, scores + 4 * t, wide, none)
        for t in range(middle, end, LANES):
            keys = _at(cache.own_keys, (mine + t - middle) * head_dim)
            _few(group, q, head_dim, keys, LANES, head_dim, scores + 4 * t, wide, none)
        for g in range(group):
            _softmax(scores + 4 * g * wide, end, before, middle, middle + own)
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
            _gate(_at(s.gate_up, 2 * r * half), _at(s.gate_up, (2 * r + 1) * half), half)
        _matmul(s.gate_up, rows, m.down, layer, m.down_bias, s.change)
        _add(s.x, rows, s.change)
    _norm(s.x, rows, m.norm, m.eps, s.normed)


@_compiled
def head(m: Model, hidden: F32, rows: int, logits: F32) -> None:
    """``hidden [R, d]`` -> ``logits [R, V']``, both with room for a multiple of ``ROWS``."""
    _matmul(hidden, rows, m.head, m.head.shape[0] - 1, m.head_bias, logits)
