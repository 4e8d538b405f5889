# ruff: noqa: ARG001  (an intrinsic's arguments are types; most are fixed by the signature that it returns)
"""The intrinsics: register tiles of dot products, memory access by address, vector activation and softmax.

Kernels hand addresses to these as int64. A row is reached through a table of addresses on the stack, so one
tile serves contiguous matrices, gathered tokens, scattered results and expert slots alike.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coli_server.engine.kernels import lanes as ln
from coli_server.engine.kernels.formats import format_of


def _tile(rows: int, columns: int) -> Any:
    """The products of `rows` rows of x with `columns` rows of w (a multiple of 4), all of length k.

    tile(tag, xs, ws, ys, k, valid): xs and ws are addresses of tables of row addresses, int64 [rows] and
    [columns]; ys of a table of result addresses, int64 [rows, columns / 4]: each takes four float32, or the
    first `valid` of them. Every product has its own accumulator of 16 lanes, added to in steps of 16 along k.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context: Any, tag: Any, xs: Any, ws: Any, ys: Any, k: Any, valid: Any) -> Any:
        weights = format_of(tag)

        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            _, xs, ws, ys, k, valid = args
            x_rows, w_rows = _addresses(b, xs, rows), _addresses(b, ws, columns)
            zero = ln.constant(ln.vector(ln.F32), 0.0)
            sums = [[cgutils.alloca_once(b, zero.type) for _ in w_rows] for _ in x_rows]
            for row in sums:
                for cell in row:
                    b.store(zero, cell)

            def step(offset: Any, mask: Any = None) -> None:
                x_offset, w_offset = (b.mul(offset, ln.I64(size)) for size in (4, weights.item_bytes))
                x = [_load_x(b, b.add(row, x_offset), mask) for row in x_rows]
                for j, row in enumerate(w_rows):
                    w = weights.load(b, b.add(row, w_offset), mask)
                    for i in range(rows):
                        b.store(ln.fma(b, x[i], w, b.load(sums[i][j])), sums[i][j])

            full = b.and_(k, ln.I64(-ln.LANES))
            with cgutils.for_range_slice(b, ln.I64(0), full, ln.I64(ln.LANES), ln.I64) as (offset, _):
                step(offset)
            rest = b.sub(k, full)
            with b.if_then(b.icmp_signed(">", rest, ln.I64(0)), likely=False):
                step(full, ln.first_lanes(b, rest))
            results = [
                ln.sum_four(b, [b.load(cell) for cell in row[j : j + 4]])
                for row in sums
                for j in range(0, columns, 4)
            ]
            _store_quads(b, results, _addresses(b, ys, len(results)), valid)
            return context.get_dummy_value()

        return types.void(tag, *[types.int64] * 5), generate

    return tile


def _addresses(b: Any, table: Any, count: int) -> list[Any]:
    return [ln.load(b, b.add(table, ln.I64(8 * i)), ln.I64) for i in range(count)]


def _load_x(b: Any, address: Any, mask: Any) -> Any:
    kind = ln.vector(ln.F32)
    return ln.load(b, address, kind) if mask is None else ln.load_masked(b, address, kind, mask)


def _store_quads(b: Any, quads: list[Any], addresses: list[Any], valid: Any) -> None:
    with b.if_else(b.icmp_signed(">=", valid, ln.I64(4)), likely=True) as (whole, part):
        with whole:
            for quad, address in zip(quads, addresses, strict=True):
                ln.store(b, quad, address)
        with part:
            mask = ln.first_lanes(b, valid, 4)
            for quad, address in zip(quads, addresses, strict=True):
                ln.store_masked(b, quad, address, mask)


TILE_1X4 = _tile(1, 4)
TILE_1X8 = _tile(1, 8)
TILE_2X4 = _tile(2, 4)
TILE_4X4 = _tile(4, 4)
TILE_6X4 = _tile(6, 4)


def _stack(words: int) -> Any:
    """The address of `words` * 8 bytes on the stack of the calling function, aligned to 64 bytes."""

    @intrinsic  # type: ignore[untyped-decorator]
    def stack(_context: Any) -> Any:
        def generate(_context: Any, b: Any, _signature: Any, _args: Any) -> Any:
            with b.goto_entry_block():
                memory = b.alloca(ir.ArrayType(ln.I64, words))
                memory.align = 64
                return b.ptrtoint(memory, ln.I64)

        return types.int64(), generate

    return stack


STACK_8 = _stack(8)
STACK_16 = _stack(16)
STACK_48 = _stack(48)
STACK_96 = _stack(96)
STACK_128 = _stack(128)
STACK_384 = _stack(384)


@intrinsic  # type: ignore[untyped-decorator]
def put_address(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """table[index] = value, for a table of int64 at `address`."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        address, index, value = args
        ln.store(b, value, b.add(address, b.mul(index, ln.I64(8))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def get_float(_context: Any, address: Any, index: Any) -> Any:
    """float32 number `index` from `address` on."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return ln.load(b, b.add(args[0], b.mul(args[1], ln.I64(4))), ln.F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def put_float(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 as number `index` from `address` on."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        ln.store(b, args[2], b.add(args[0], b.mul(args[1], ln.I64(4))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def lane_sum(_context: Any, x: Any, n: Any) -> Any:
    """The sum of n float32 from address x on, in the fixed order of 16 lanes."""
    return types.float32(types.int64, types.int64), _reduction(lambda b, total, v: b.fadd(total, v))


@intrinsic  # type: ignore[untyped-decorator]
def lane_sum_squares(_context: Any, x: Any, n: Any) -> Any:
    """The sum of the squares of n float32 from address x on, in the fixed order of 16 lanes."""
    return types.float32(types.int64, types.int64), _reduction(lambda b, total, v: ln.fma(b, v, v, total))


def _reduction(add: Callable[[Any, Any, Any], Any]) -> Any:
    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, n = args
        total = cgutils.alloca_once(b, ln.vector(ln.F32))
        b.store(ln.constant(ln.vector(ln.F32), 0.0), total)

        def body(offset: Any, mask: Any) -> None:
            v = _load_x(b, b.add(x, b.mul(offset, ln.I64(4))), mask)
            b.store(add(b, b.load(total), v), total)

        _each_step(b, n, body)
        return ln.sum_lanes(b, b.load(total))

    return generate


def _each_step(b: Any, n: Any, body: Callable[[Any, Any], None]) -> None:
    """Run body(offset, mask) for every 16 of n elements: without a mask, then once with one for the rest."""
    full = b.and_(n, ln.I64(-ln.LANES))
    with cgutils.for_range_slice(b, ln.I64(0), full, ln.I64(ln.LANES), ln.I64) as (offset, _):
        body(offset, None)
    rest = b.sub(n, full)
    with b.if_then(b.icmp_signed(">", rest, ln.I64(0))):
        body(full, ln.first_lanes(b, rest))


def _gated(activate: Callable[[Any, Any, Any, Any, Any], Any]) -> Any:
    """gated(gate, up, out, n, alpha, limit): out[i] = activate(gate[i], up[i]), n float32 at each address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def gated(_context: Any, gate: Any, up: Any, out: Any, n: Any, alpha: Any, limit: Any) -> Any:
        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            gate, up, out, n, alpha, limit = args
            alpha, limit = ln.splat(b, alpha), ln.splat(b, limit)

            def body(offset: Any, mask: Any) -> None:
                g, u, to = (b.add(base, b.mul(offset, ln.I64(4))) for base in (gate, up, out))
                value = activate(b, _load_x(b, g, mask), _load_x(b, u, mask), alpha, limit)
                if mask is None:
                    ln.store(b, value, to)
                else:
                    ln.store_masked(b, value, to, mask)

            _each_step(b, n, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float32, types.float32), generate

    return gated


def _sigmoid(b: Any, x: Any) -> Any:
    one = ln.constant(x.type, 1.0)
    return b.fdiv(one, b.fadd(one, ln.exp(b, b.fneg(x))))


def _silu(b: Any, g: Any, u: Any, _alpha: Any, _limit: Any) -> Any:
    return b.fmul(b.fmul(g, _sigmoid(b, g)), u)


def _clamped_swiglu(b: Any, g: Any, u: Any, alpha: Any, limit: Any) -> Any:
    g = b.select(b.fcmp_ordered(">", g, limit), limit, g)
    u = b.select(b.fcmp_ordered(">", u, limit), limit, u)
    u = b.select(b.fcmp_ordered("<", u, b.fneg(limit)), b.fneg(limit), u)
    return b.fmul(b.fadd(u, ln.constant(u.type, 1.0)), b.fmul(g, _sigmoid(b, b.fmul(alpha, g))))


def _gelu_tanh(b: Any, g: Any, u: Any, _alpha: Any, _limit: Any) -> Any:
    """0.5 g (1 + tanh(z)) = g sigmoid(2 z), with z = sqrt(2 / pi) (g + 0.044715 g ** 3)."""
    cubic = b.fmul(b.fmul(g, g), b.fmul(g, ln.constant(g.type, 0.044715)))
    z2 = b.fmul(b.fadd(g, cubic), ln.constant(g.type, 1.5957691216057308))
    return b.fmul(b.fmul(g, _sigmoid(b, z2)), u)


SILU = _gated(_silu)
CLAMPED_SWIGLU = _gated(_clamped_swiglu)
GELU_TANH = _gated(_gelu_tanh)


@intrinsic  # type: ignore[untyped-decorator]
def softmax_step(_context: Any, scores: Any, count: Any, scale: Any, state: Any) -> Any:
    """Fold the first `count` of 16 scores into a running softmax; gives the factor for all summed before.

    `scores` becomes exp(scale * score - maximum), 0 beyond count. `state` is the address of two float32, the
    running maximum and the running denominator.
    """

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        scores, count, scale, state = args
        kind = ln.vector(ln.F32)
        z = b.fmul(ln.load(b, scores, kind), ln.splat(b, scale))
        z = b.select(ln.first_lanes(b, count), z, ln.constant(kind, float("-inf")))
        before, total = ln.load(b, state, ln.F32), b.add(state, ln.I64(4))
        most = ln.larger(b, before, ln.fold(b, z, ln.larger))
        p = ln.exp(b, b.fsub(z, ln.splat(b, most)))
        factor = b.extract_element(ln.exp(b, ln.splat(b, b.fsub(before, most))), ln.I32(0))
        ln.store(b, p, scores)
        ln.store(b, most, state)
        ln.store(b, b.fadd(b.fmul(ln.load(b, total, ln.F32), factor), ln.sum_lanes(b, p)), total)
        return factor

    return types.float32(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def weighted_rows(_context: Any, p: Any, rows: Any, count: Any, n: Any, out: Any, factor: Any) -> Any:
    """out[d] = factor * out[d] + sum over j of p[j] * rows[j][d], j in order; d < n, j < count.

    p and out are addresses of float32, rows of a table of `count` row addresses.
    """

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        p, rows, count, n, out, factor = args
        kind, factor = ln.vector(ln.F32), ln.splat(b, factor)

        def block(first: Any, vectors: int, mask: Any = None) -> None:
            offsets = [b.add(b.mul(first, ln.I64(4)), ln.I64(64 * v)) for v in range(vectors)]
            sums = [cgutils.alloca_once(b, kind) for _ in offsets]
            for cell, offset in zip(sums, offsets, strict=True):
                b.store(b.fmul(_load_x(b, b.add(out, offset), mask), factor), cell)
            with cgutils.for_range(b, count) as loop:
                weight = ln.splat(b, ln.load(b, b.add(p, b.mul(loop.index, ln.I64(4))), ln.F32))
                row = ln.load(b, b.add(rows, b.mul(loop.index, ln.I64(8))), ln.I64)
                for cell, offset in zip(sums, offsets, strict=True):
                    b.store(ln.fma(b, weight, _load_x(b, b.add(row, offset), mask), b.load(cell)), cell)
            for cell, offset in zip(sums, offsets, strict=True):
                if mask is None:
                    ln.store(b, b.load(cell), b.add(out, offset))
                else:
                    ln.store_masked(b, b.load(cell), b.add(out, offset), mask)

        wide = b.and_(n, ln.I64(-64))
        with cgutils.for_range_slice(b, ln.I64(0), wide, ln.I64(64), ln.I64) as (first, _):
            block(first, 4)
        full = b.and_(n, ln.I64(-ln.LANES))
        with cgutils.for_range_slice(b, wide, full, ln.I64(ln.LANES), ln.I64) as (first, _):
            block(first, 1)
        rest = b.sub(n, full)
        with b.if_then(b.icmp_signed(">", rest, ln.I64(0))):
            block(full, 1, ln.first_lanes(b, rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), generate
