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
from numba.np.arrayobj import make_array

from coli_server.engine.kernels import lanes as ln
from coli_server.engine.kernels.dots import Dots, Row, each_block, prepare_row
from coli_server.engine.kernels.formats import Chunk, Format, format_of


def _tile(rows: int, columns: int) -> Any:
    """The products of `rows` rows of x with `columns` rows of w (a multiple of 4), all of length k.

    tile(tag, xs, ws, ys, shift, k, valid): xs and ws are addresses of tables of row addresses, int64 [rows]
    and [columns]; ys of a table of result addresses, int64 [rows, columns / 4], to each of which `shift`
    bytes are added: each takes four float32, or the first `valid` of them. Rows of x are prepared where the
    format has a prepared form. Every product has its own accumulator of 16 lanes, added to along k.
    """

    @intrinsic
    def tile(_context: Any, tag: Any, xs: Any, ws: Any, ys: Any, shift: Any, k: Any, valid: Any) -> Any:
        weights = format_of(tag)

        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            value, xs, ws, ys, shift, k, valid = args
            x_rows, w_rows = _addresses(b, xs, rows), _addresses(b, ws, columns)
            sums = [[_accumulator(b) for _ in w_rows] for _ in x_rows]
            if weights.dots is None:
                _sum_products(b, weights, x_rows, [Row(row, k, value) for row in w_rows], sums)
            else:
                _sum_dots(b, weights.dots, x_rows, [Row(row, k, value) for row in w_rows], sums)
            quads = [[b.load(cell) for cell in row[j : j + 4]] for row in sums for j in range(0, columns, 4)]
            results = [ln.sum_four(b, quad) for quad in quads]
            _store_quads(b, results, [b.add(y, shift) for y in _addresses(b, ys, len(results))], valid)
            return context.get_dummy_value()

        return types.void(tag, *[types.int64] * 6), generate

    return tile


def _sum_products(
    b: Any, weights: Format, x_rows: list[Any], w_rows: list[Row], sums: list[list[Any]]
) -> None:
    """Add to the sums by one multiplication a weight; x rows are float32."""
    ahead = _behind(b, w_rows)

    def step(chunk: Chunk) -> None:
        offset = b.mul(b.add(chunk.start, ln.I64(ln.LANES * chunk.step)), ln.I64(4))
        x = [_load(b, b.add(row, offset), chunk.mask) for row in x_rows]
        for j, row in enumerate(w_rows):
            weights.prefetch(b, b.add(row.address, ahead), chunk)
            w = weights.load(b, row.tag, row.address, row.k, chunk)
            for i, values in enumerate(x):
                b.store(ln.fma(b, values, w, b.load(sums[i][j])), sums[i][j])

    _each_chunk(b, w_rows[0].k, step, unroll=(4,))


def _behind(b: Any, w_rows: list[Row]) -> Any:
    """How many bytes behind a row the one lies that takes its place next.

    Rows of weights are too short streams for the processor to foresee the next, and with few rows of x memory
    is what takes time: so these are asked for meanwhile.
    """
    return b.mul(b.sub(w_rows[1].address, w_rows[0].address), ln.I64(len(w_rows)))


def _sum_dots(b: Any, dots: Dots, x_rows: list[Any], w_rows: list[Row], sums: list[list[Any]]) -> None:
    """Add to the sums by dot-product instructions; x rows are prepared.

    Several rows of x meet `dots.columns` rows of weights at a time, one meets all of them.
    """
    lone = len(x_rows) == 1
    width = len(w_rows) if lone else dots.columns
    ahead = _behind(b, w_rows)

    def add_columns(columns: range) -> None:
        def step(start: Any, rest: Any) -> None:
            number = b.udiv(start, ln.I64(dots.block))
            blocks = [b.add(row, b.mul(number, ln.I64(dots.size))) for row in x_rows]
            weights = [dots.weights(b, w_rows[j], start, rest) for j in columns]
            for j in columns:
                ln.prefetch(b, b.add(b.add(w_rows[j].address, ahead), b.mul(number, ln.I64(64))))
            for i, block in enumerate(blocks):
                for j, w in zip(columns, weights, strict=True):
                    b.store(dots.add(b, block, w, b.load(sums[i][j])), sums[i][j])

        each_block(b, dots.block, w_rows[0].k, step)

    for first in range(0, len(w_rows), width):
        add_columns(range(first, first + width))


@intrinsic
def prepared_bytes(_context: Any, tag: Any, k: Any) -> Any:
    """Bytes of a prepared row of k activations, a multiple of 64; 0 where rows are taken as they are."""
    dots = format_of(tag).dots

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        if dots is None:
            return ln.I64(0)
        blocks = b.udiv(b.add(args[1], ln.I64(dots.block - 1)), ln.I64(dots.block))
        return b.mul(blocks, ln.I64(dots.size))

    return types.int64(tag, types.int64), generate


@intrinsic
def prepare(_context: Any, tag: Any, x: Any, k: Any, out: Any) -> Any:
    """Prepare a row of k float32 at address x at address `out`; only where there is a prepared form."""
    dots = format_of(tag).dots

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        if dots is not None:
            prepare_row(b, dots, *args[1:])
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 3), generate


@intrinsic
def task_rows(_context: Any, tag: Any) -> Any:
    """Results of a first product that a task works out, so that it can prepare them for a second."""
    dots = format_of(tag).dots
    rows = 16 if dots is None else max(64, dots.block)
    return types.int64(tag), lambda *_: ln.I64(rows)


def _addresses(b: Any, table: Any, count: int) -> list[Any]:
    return [ln.load(b, b.add(table, ln.I64(8 * i)), ln.I64) for i in range(count)]


def _accumulator(b: Any) -> Any:
    return cgutils.alloca_once_value(b, ln.constant(ln.vector(ln.F32), 0.0))


def _load(b: Any, address: Any, mask: Any) -> Any:
    kind = ln.vector(ln.F32)
    return ln.load(b, address, kind) if mask is None else ln.load_masked(b, address, kind, mask)


def _store(b: Any, value: Any, address: Any, mask: Any) -> None:
    if mask is None:
        ln.store(b, value, address)
    else:
        ln.store_masked(b, value, address, mask)


def _each_step(b: Any, n: Any, body: Callable[[Any, Any], None]) -> None:
    """Run body(offset, mask) for every 16 of n elements: without a mask, then once with one for the rest."""
    _each_chunk(b, n, lambda chunk: body(chunk.start, chunk.mask))


def _each_chunk(b: Any, n: Any, body: Callable[[Chunk], None], unroll: tuple[int, ...] = ()) -> None:
    """Run `body` for every 16 of n elements: without a mask, then once with one for the rest.

    `unroll` are the numbers of steps to run as one as long as so many are left, falling.
    """
    done = ln.I64(0)
    for steps in (*unroll, 1):
        size = ln.LANES * steps
        until = b.and_(n, ln.I64(-size))
        with cgutils.for_range_slice(b, done, until, ln.I64(size), ln.I64) as (offset, _):
            for step in range(steps):
                body(Chunk(offset, step, steps, None))
        done = until
    rest = b.sub(n, done)
    with b.if_then(b.icmp_signed(">", rest, ln.I64(0)), likely=False):
        body(Chunk(done, 0, 1, ln.first_lanes(b, rest)))


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
TILE_3X4 = _tile(3, 4)
TILE_4X4 = _tile(4, 4)
TILE_5X4 = _tile(5, 4)
TILE_6X4 = _tile(6, 4)


def _stack(words: int) -> Any:
    """The address of `words` * 8 bytes on the stack of the calling function, aligned to 64 bytes."""

    @intrinsic
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
STACK_64 = _stack(64)
STACK_384 = _stack(384)
STACK_768 = _stack(768)


@intrinsic
def address(_context: Any, array: Any) -> Any:
    """Where an array's data begins, as int64 (`ctypes.data` is unsigned and would turn sums into float64)."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.ptrtoint(make_array(signature.args[0])(context, b, args[0]).data, ln.I64)

    return types.int64(array), generate


@intrinsic
def put_address(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """table[index] = value, for a table of int64 at `address`."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        address, index, value = args
        ln.store(b, value, b.add(address, b.mul(index, ln.I64(8))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def get_float(_context: Any, address: Any, index: Any) -> Any:
    """float32 number `index` from `address` on."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return ln.load(b, b.add(args[0], b.mul(args[1], ln.I64(4))), ln.F32)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def put_float(_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Store a float32 as number `index` from `address` on."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        ln.store(b, args[2], b.add(args[0], b.mul(args[1], ln.I64(4))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def copy_floats(_context: Any, source: Any, target: Any, n: Any) -> Any:
    """Copy n float32 from one address to another; they do not overlap."""

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        source, target, n = args

        def step(offset: Any, mask: Any) -> None:
            at = b.mul(offset, ln.I64(4))
            _store(b, _load(b, b.add(source, at), mask), b.add(target, at), mask)

        _each_step(b, n, step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def lane_sum(_context: Any, x: Any, n: Any) -> Any:
    """The sum of n float32 from address x on, in the fixed order of 16 lanes."""
    return types.float32(types.int64, types.int64), _reduction(lambda b, total, v: b.fadd(total, v))


@intrinsic
def lane_sum_squares(_context: Any, x: Any, n: Any) -> Any:
    """The sum of the squares of n float32 from address x on, in the fixed order of 16 lanes."""
    return types.float32(types.int64, types.int64), _reduction(lambda b, total, v: ln.fma(b, v, v, total))


def _reduction(add: Callable[[Any, Any, Any], Any]) -> Any:
    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        x, n = args
        total = _accumulator(b)

        def step(offset: Any, mask: Any) -> None:
            b.store(add(b, b.load(total), _load(b, b.add(x, b.mul(offset, ln.I64(4))), mask)), total)

        _each_step(b, n, step)
        return ln.sum_lanes(b, b.load(total))

    return generate


def _gated(activate: Callable[[Any, Any, Any, Any, Any], Any]) -> Any:
    """gated(gate, up, out, n, alpha, limit): out[i] = activate(gate[i], up[i]), n float32 at each address."""

    @intrinsic
    def gated(_context: Any, gate: Any, up: Any, out: Any, n: Any, alpha: Any, limit: Any) -> Any:
        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            gate, up, out, n, alpha, limit = args
            alpha, limit = ln.splat(b, alpha), ln.splat(b, limit)

            def step(offset: Any, mask: Any) -> None:
                g, u, to = (b.add(base, b.mul(offset, ln.I64(4))) for base in (gate, up, out))
                _store(b, activate(b, _load(b, g, mask), _load(b, u, mask), alpha, limit), to, mask)

            _each_step(b, n, step)
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


@intrinsic
def softmax_step(_context: Any, scores: Any, first: Any, stop: Any, scale: Any, state: Any) -> Any:
    """Fold scores first..stop - 1 of a block into a running softmax.

    `scores` is the address of the block, a whole number of 16 float32; up to the 16 that hold stop - 1 they
    become exp(scale * score - maximum), and 0 before `first` and from `stop` on. `state` is the address of
    three float32: running maximum, running denominator, and the factor by which all earlier terms shrink.
    """

    def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
        scores, first, stop, scale, state = args
        kind, numbers = ln.vector(ln.F32), ln.vector(ln.I64)
        lowest = ln.constant(kind, float("-inf"))
        first, stop_lanes, scale = ln.splat(b, first), ln.splat(b, stop), ln.splat(b, scale)
        maximum, total, factor = (b.add(state, ln.I64(4 * i)) for i in range(3))
        before = ln.load(b, maximum, ln.F32)
        largest, summed = cgutils.alloca_once_value(b, lowest), _accumulator(b)

        def each(body: Callable[[Any, Any], None]) -> None:
            with cgutils.for_range_slice(b, ln.I64(0), stop, ln.I64(ln.LANES), ln.I64) as (offset, _):
                body(offset, b.add(scores, b.mul(offset, ln.I64(4))))

        def weigh(offset: Any, address: Any) -> None:
            lanes = b.add(ln.splat(b, offset), ir.Constant(numbers, list(range(ln.LANES))))
            inside = b.and_(b.icmp_signed(">=", lanes, first), b.icmp_signed("<", lanes, stop_lanes))
            z = b.select(inside, b.fmul(ln.load(b, address, kind), scale), lowest)
            ln.store(b, z, address)
            b.store(ln.larger(b, b.load(largest), z), largest)

        each(weigh)
        most = ln.larger(b, before, ln.fold(b, b.load(largest), ln.larger))

        def exponentiate(_offset: Any, address: Any) -> None:
            p = ln.exp(b, b.fsub(ln.load(b, address, kind), ln.splat(b, most)))
            ln.store(b, p, address)
            b.store(b.fadd(b.load(summed), p), summed)

        each(exponentiate)
        shrink = b.extract_element(ln.exp(b, ln.splat(b, b.fsub(before, most), 4)), ln.I32(0))
        denominator = b.fadd(b.fmul(ln.load(b, total, ln.F32), shrink), ln.sum_lanes(b, b.load(summed)))
        for value, address in ((most, maximum), (denominator, total), (shrink, factor)):
            ln.store(b, value, address)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int64), generate


def _weighted(heads: int, *widths: int) -> Any:
    """weighted(p, p_stride, state, rows, first, stop, n, out, out_stride), for `heads` heads that share rows:

    out[h][d] = factor[h] * out[h][d] + the sum over j, in order, of p[h][j] * rows[j][d], for
    first <= j < stop and d < n. p and out are addresses of float32, heads so many bytes apart; rows of a
    table of row addresses; the factor is the third of a head's four float32 in `state`. `widths` are the
    numbers of vectors that are summed at a time.
    """

    @intrinsic
    def weighted(
        _context: Any,
        p: Any,
        p_stride: Any,
        state: Any,
        rows: Any,
        first: Any,
        stop: Any,
        n: Any,
        out: Any,
        out_stride: Any,
    ) -> Any:
        def generate(context: Any, b: Any, _signature: Any, args: Any) -> Any:
            p, p_stride, state, rows, first, stop, n, out, out_stride = args
            ps = [b.add(p, b.mul(p_stride, ln.I64(h))) for h in range(heads)]
            outs = [b.add(out, b.mul(out_stride, ln.I64(h))) for h in range(heads)]
            factors = [
                ln.splat(b, ln.load(b, b.add(state, ln.I64(16 * h + 8)), ln.F32)) for h in range(heads)
            ]

            def block(at: Any, count: int, mask: Any) -> None:
                offsets = [b.add(b.mul(at, ln.I64(4)), ln.I64(64 * v)) for v in range(count)]
                cells = [[cgutils.alloca_once(b, ln.vector(ln.F32)) for _ in offsets] for _ in outs]
                for head, factor, sums in zip(outs, factors, cells, strict=True):
                    for offset, cell in zip(offsets, sums, strict=True):
                        b.store(b.fmul(_load(b, b.add(head, offset), mask), factor), cell)
                with cgutils.for_range_slice(b, first, stop, ln.I64(1), ln.I64) as (j, _):
                    row = ln.load(b, b.add(rows, b.mul(j, ln.I64(8))), ln.I64)
                    values = [_load(b, b.add(row, offset), mask) for offset in offsets]
                    for head, sums in zip(ps, cells, strict=True):
                        weight = ln.splat(b, ln.load(b, b.add(head, b.mul(j, ln.I64(4))), ln.F32))
                        for value, cell in zip(values, sums, strict=True):
                            b.store(ln.fma(b, weight, value, b.load(cell)), cell)
                for head, sums in zip(outs, cells, strict=True):
                    for offset, cell in zip(offsets, sums, strict=True):
                        _store(b, b.load(cell), b.add(head, offset), mask)

            done = ln.I64(0)
            for count in (*widths, 1):
                until = b.sub(n, b.srem(b.sub(n, done), ln.I64(ln.LANES * count)))
                with cgutils.for_range_slice(b, done, until, ln.I64(ln.LANES * count), ln.I64) as (at, _):
                    block(at, count, None)
                done = until
            rest = b.sub(n, done)
            with b.if_then(b.icmp_signed(">", rest, ln.I64(0)), likely=False):
                block(done, 1, ln.first_lanes(b, rest))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return weighted


WEIGHTED_1 = _weighted(1, 8, 4)
WEIGHTED_2 = _weighted(2, 4)
WEIGHTED_3 = _weighted(3, 4)
WEIGHTED_4 = _weighted(4, 4)
