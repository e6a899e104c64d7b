"""Instructions of the CPU decoder that numba's own compiler would not write so: LLVM's, emitted for vectors of ``LANES`` floats.

Each function here takes addresses and counts as int64 numbers; :mod:`coterie.engines.kernels` calls them from compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # keys scored at once, and columns of a product of attention: one AVX-512 register, two or four of others
_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
ROWS, COLUMNS = (8, 32) if _WIDE else (4, 16)  # a tile of a matrix product: as many sums as fit in registers

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


address: Any = intrinsic(_address)


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


gate = _emitted(types.void, 3, _gate_of)
softmax = _emitted(types.void, 5, _softmax_of)
rotate = _emitted(types.void, 4, _rotate_of)
keep = _emitted(types.void, 5, _keep_of)
tile = _product(ROWS, COLUMNS // LANES, 1, True)
few_1, few_2 = _product(1, 1, 4, False), _product(2, 1, 2, False)
few_3, few_4 = _product(3, 1, 2, False), _product(4, 1, 1, False)
