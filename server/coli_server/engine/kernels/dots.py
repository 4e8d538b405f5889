"""Quantised rows and integer dot products: four multiplications of bytes in each of 16 lanes an instruction.

Where the processor has AVX512-VNNI, a row of activations is prepared once and then meets every quantised row.
Activations that follow each other, as many as 64 bytes hold codes, share a scale: x = scale * (256 * high +
low) with two int8 numbers, so that x is kept within 2^-16 of the largest of them. The sums of a block are
integers and exact; block by block they are scaled and added to 16 float32 lanes. So, as elsewhere, a product
depends on its two rows only.

Measured on Zen 4 against float32 arithmetic on widened codes, one row of activations, in memory: 1.5 times as
fast at 8 bits and twice at 4. Bfloat16 dot products, with activations split in two, gave nothing over float32
there, and take denormals as zeros: bfloat16 weights do without, unless somebody asks for it (see rounded.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import llvmlite.binding
from numba.core import cgutils

from coli_server.engine.kernels import lanes as ln

HAS_INTEGER_DOT: Final = {"avx512vnni", "avx512bw", "avx512vl"} <= ln.host_features()

_BYTES, _WORDS, _LANES = ln.vector(ln.I8, 64), ln.vector(ln.I16, 32), ln.vector(ln.I32)
_FLOATS = ln.vector(ln.F32)

_LARGEST = 32639
"""What 256 * high + low can be with both within int8: 127 * 256 + 127."""

_SMALLEST = 1e-30
"""Blocks whose largest activation is smaller count as zeros: the reciprocal would overflow."""


@dataclass(frozen=True)
class Row:
    """A weight row of k weights at `address`; `tag` is the format's, with the logarithm of its group."""

    address: ln.Value
    k: ln.Value
    tag: ln.Value


class Dots(Protocol):
    """IR generators of one kind of dot products, block by block, of a prepared row with rows of weights."""

    @property
    def block(self) -> int:
        """Weights of a step."""
        ...

    @property
    def size(self) -> int:
        """Bytes of a block of prepared activations, a multiple of 64."""
        ...

    @property
    def columns(self) -> int:
        """Rows of weights that several rows of activations meet at a time, so that blocks of all of them
        stay in registers."""
        ...

    def prepare(self, b: ln.Builder, x: Sequence[ln.Value], out: ln.Value) -> None:
        """Store a block of activations, `block` / 16 vectors of float32, at address `out`."""
        ...

    def weights(self, b: ln.Builder, row: Row, start: ln.Value, rest: ln.Value | None) -> list[ln.Value]:
        """What `add` needs of the weights from `start` on, a multiple of `block`; if there are only `rest`
        of them, what is behind is 0."""
        ...

    def add(self, b: ln.Builder, x: ln.Value, weights: list[ln.Value], total: ln.Value) -> ln.Value:
        """`total`, 16 float32, with the products of the prepared block at address `x` added."""
        ...


@dataclass(frozen=True)
class IntegerDots:
    """IR generators for rows of codes of 8 or 4 bits.

    A prepared row is a sequence of blocks, zeros behind its end. A block is 64 high parts and 64 low parts,
    int8, for each vector of 64 codes; then for 16 lanes what makes up for the codes' offset (int32); then 16
    times the scale (float32). Lane l stands for the activations whose codes are bytes 4 l to 4 l + 3 of a
    vector.
    """

    bits: int
    span: int
    """Weights that share a scale, or a divisor of their number."""

    columns: int = 2

    @property
    def block(self) -> int:
        """Weights of a step: those of 64 bytes of codes."""
        return 64 * self._vectors

    @property
    def size(self) -> int:
        """Bytes of a block of prepared activations, a multiple of 64."""
        return 128 * self._vectors + 128

    @property
    def _vectors(self) -> int:
        """Vectors of 64 codes in a block; 64 bytes hold 128 codes of four bits."""
        return 8 // self.bits

    def prepare(self, b: ln.Builder, x: Sequence[ln.Value], out: ln.Value) -> None:
        """Store a block of activations, `block` / 16 vectors of float32, at address `out`."""
        scale, inverse = _scales(b, x)
        rounder = ln.constant(_FLOATS, 12582912.0)  # see `lanes.exp`
        wholes = [b.bitcast(ln.fma(b, values, inverse, rounder), _LANES) for values in x]
        wholes = [b.sub(whole, b.bitcast(rounder, _LANES)) for whole in wholes]
        sums = ln.constant(_LANES, 0)
        for v in range(self._vectors):
            # Of four-bit codes, a byte's low half belongs to chunk 2 i and its high half to chunk 2 i + 1.
            chunks = wholes[v :: self._vectors]
            low = _narrow(b, chunks)
            carried = [
                b.ashr(b.add(chunk, ln.constant(_LANES, 128)), ln.constant(_LANES, 8)) for chunk in chunks
            ]
            high = _narrow(b, carried)
            ln.store(b, high, b.add(out, ln.I64(128 * v)))
            ln.store(b, low, b.add(out, ln.I64(128 * v + 64)))
            ones = ln.constant(_BYTES, 1)
            sums = b.add(sums, _joined(b, _dot(b, None, ones, high), _dot(b, None, ones, low)))
        behind = b.add(out, ln.I64(128 * self._vectors))
        ln.store(b, b.mul(sums, ln.constant(_LANES, -self._offset)), behind)
        ln.store(b, scale, b.add(behind, ln.I64(64)))

    @property
    def _offset(self) -> int:
        """By how much a code is larger than the weight in units of the scale."""
        return 1 << self.bits - 1

    def weights(self, b: ln.Builder, row: Row, start: ln.Value, rest: ln.Value | None) -> list[ln.Value]:
        """The codes from `start` on, a multiple of `block`, as unsigned bytes, and last their scales.

        If there are only `rest` of them, what is behind is 0.
        """
        at = b.add(row.address, b.lshr(start, ln.I64(self._vectors - 1)))
        stored = load_first(b, at, _BYTES, None if rest is None else self._code_bytes(b, rest))
        if self.bits == 8:
            codes = [b.xor(stored, ln.constant(_BYTES, -128))]
        else:
            mask = ln.constant(_BYTES, 15)
            shifted = b.bitcast(b.lshr(b.bitcast(stored, _WORDS), ln.constant(_WORDS, 4)), _BYTES)
            codes = [b.and_(stored, mask), b.and_(shifted, mask)]
        return [*codes, self._weight_scales(b, row, start, rest)]

    def _code_bytes(self, b: ln.Builder, count: ln.Value) -> ln.Value:
        """Bytes of the codes of `count` weights, which are padded to whole 16 bytes."""
        whole = 16 * self._vectors
        return b.lshr(b.and_(b.add(count, ln.I64(whole - 1)), ln.I64(-whole)), ln.I64(self._vectors - 1))

    def _weight_scales(self, b: ln.Builder, row: Row, start: ln.Value, rest: ln.Value | None) -> ln.Value:
        size = self._code_bytes(b, row.k)
        parts = max(1, self.block // self.span)
        found = None
        for part in range(parts):
            first = b.add(start, ln.I64(part * self.span))
            if rest is not None and part:  # behind the end there is no scale, and any will do
                first = b.select(b.icmp_signed("<", first, row.k), first, start)
            group = b.lshr(first, b.zext(row.tag, ln.I64))
            at = b.add(row.address, b.add(size, b.shl(group, ln.I64(1))))
            one = b.bitcast(ln.splat(b, ln.load(b, at, ln.I16), 32), _LANES)
            if found is None:
                found = one
            else:
                lanes = [16 + lane if lane >= part * 16 // parts else lane for lane in range(16)]
                found = ln.shuffle(b, found, one, lanes)
        return b.bitcast(b.shl(found, ln.constant(_LANES, 16)), _FLOATS)

    def add(self, b: ln.Builder, x: ln.Value, weights: list[ln.Value], total: ln.Value) -> ln.Value:
        """`total`, 16 float32, with the products of the prepared block at address `x` added."""
        *codes, scale = weights
        behind = b.add(x, ln.I64(128 * self._vectors))
        high, low = None, ln.load(b, behind, _LANES)
        for v, vector in enumerate(codes):
            high = _dot(b, high, vector, ln.load(b, b.add(x, ln.I64(128 * v)), _BYTES))
            low = _dot(b, low, vector, ln.load(b, b.add(x, ln.I64(128 * v + 64)), _BYTES))
        values = b.sitofp(_joined(b, high, low), _FLOATS)
        return ln.fma(b, values, b.fmul(scale, ln.load(b, b.add(behind, ln.I64(64)), _FLOATS)), total)


def load_first(b: ln.Builder, address: ln.Value, kind: Any, count: ln.Value | None) -> ln.Value:
    """A vector, or its first `count` elements and zeros."""
    if count is None:
        return ln.load(b, address, kind)
    return ln.load_masked(b, address, kind, ln.first_lanes(b, count, kind.count))


def _dot(b: ln.Builder, total: ln.Value | None, codes: ln.Value, x: ln.Value) -> ln.Value:
    """total, int32 [16], plus the four products of each lane's bytes, unsigned with signed."""
    operand = _BYTES if llvmlite.binding.llvm_version_info >= (22,) else _LANES  # as LLVM declares it
    function = ln.declare(b, "llvm.x86.avx512.vpdpbusd.512", _LANES, [_LANES, operand, operand])
    start = ln.constant(_LANES, 0) if total is None else total
    return b.call(function, [start, b.bitcast(codes, operand), b.bitcast(x, operand)])


def _joined(b: ln.Builder, high: ln.Value, low: ln.Value) -> ln.Value:
    return b.add(low, b.shl(high, ln.constant(_LANES, 8)))


def _narrow(b: ln.Builder, chunks: Sequence[ln.Value]) -> ln.Value:
    """The lowest bytes of four vectors of int32, int8 [64]."""
    parts = [b.trunc(chunk, ln.vector(ln.I8)) for chunk in chunks]
    halves = [ln.shuffle(b, parts[i], parts[i + 1], list(range(32))) for i in (0, 2)]
    return ln.shuffle(b, halves[0], halves[1], range(64))


def _scales(b: ln.Builder, x: Sequence[ln.Value]) -> tuple[ln.Value, ln.Value]:
    """What a whole number of a block stands for, and its reciprocal, in 16 lanes.

    The first is NaN if any activation is infinite or NaN, so that this shows in every product.
    """
    zero = ln.constant(_FLOATS, 0.0)
    magnitude = ln.declare(b, "llvm.fabs.v16f32", _FLOATS, [_FLOATS])
    largest, doubt = zero, zero
    for values in x:
        largest = ln.larger(b, largest, b.call(magnitude, [values]))
        doubt = ln.fma(b, values, zero, doubt)
    most = ln.fold(b, largest, ln.larger)
    counts = b.fcmp_ordered(">=", most, ln.constant(ln.F32, _SMALLEST))
    scale = b.fmul(most, ln.constant(ln.F32, 1.0 / _LARGEST))
    inverse = b.fdiv(ln.constant(ln.F32, float(_LARGEST)), most)
    none = ln.constant(ln.F32, 0.0)
    scale = b.fadd(b.select(counts, scale, none), ln.sum_lanes(b, doubt))
    return ln.splat(b, scale), ln.splat(b, b.select(counts, inverse, none))


def prepare_row(b: ln.Builder, dots: Dots, x: ln.Value, k: ln.Value, out: ln.Value) -> None:
    """Prepare k float32 at address `x`, block by block, at address `out`."""

    def block(start: ln.Value, rest: ln.Value | None) -> None:
        at = b.add(x, b.shl(start, ln.I64(2)))
        values = []
        for i in range(dots.block // ln.LANES):
            left = None if rest is None else b.sub(rest, ln.I64(ln.LANES * i))
            values.append(load_first(b, b.add(at, ln.I64(64 * i)), _FLOATS, left))
        number = b.udiv(start, ln.I64(dots.block))
        dots.prepare(b, values, b.add(out, b.mul(number, ln.I64(dots.size))))

    each_block(b, dots.block, k, block)


def each_block(b: ln.Builder, size: int, k: ln.Value, body: Any) -> None:
    """Run body(start, None) for every whole block of k elements, then body(start, rest) for the rest."""
    until = b.and_(k, ln.I64(-size))
    with cgutils.for_range_slice(b, ln.I64(0), until, ln.I64(size), ln.I64) as (start, _):
        body(start, None)
    rest = b.sub(k, until)
    with b.if_then(b.icmp_signed(">", rest, ln.I64(0)), likely=False):
        body(until, rest)
