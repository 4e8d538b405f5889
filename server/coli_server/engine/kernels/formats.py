# ruff: noqa: ARG002  (formats ignore what only others need)
"""Weight formats: how 16 consecutive weights of a row become 16 float32 lanes.

A kernel is compiled once per format. Numba chooses by argument types, so a format travels as a `tag`, a NumPy
scalar whose type says which (and whose value, for quantised rows, is the logarithm of the group). A new
format is one row in `_FORMATS`.

A quantised row is its codes and behind them its scales, one bfloat16 for each group of weights that follow
each other along k. So a row's address finds everything, and an expert's scales lie beside its weights:

* 8 bits: int8 codes, w = code * scale; zeros up to a whole number of 16
* 4 bits: blocks of 32 weights in 16 bytes, byte i holding weight i in its low half and weight i + 16 in its
  high one, w = (code - 8) * scale; whole blocks
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
from numba import typeof, types

from coli_server.engine.kernels import lanes as ln
from coli_server.engine.kernels.dots import HAS_INTEGER_DOT, Dots, IntegerDots
from coli_server.engine.kernels.rounded import BFloat16Dots


class Kind(IntEnum):
    """How weights are stored: bfloat16 or float16 bits in uint16, float32, or quantised rows in uint8, with
    the bits of a code and the weights of a group.

    BF16_DOT is BF16 whose products round activations to bfloat16: no form of its own in a folder.
    """

    BF16 = 0
    F16 = 1
    F32 = 2
    I8_32 = 3
    I8_64 = 4
    I8_128 = 5
    I4_32 = 6
    I4_64 = 7
    I4_128 = 8
    BF16_DOT = 9

    @property
    def quantised(self) -> bool:
        return Kind.I8_32 <= self <= Kind.I4_128

    @property
    def bits(self) -> int:
        """Bits of a weight, scales not counted."""
        return 32 if self == Kind.F32 else 16 if not self.quantised else 8 if self < Kind.I4_32 else 4

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return 32 << (self - Kind.I8_32) % 3 if self.quantised else 1

    @property
    def stored(self) -> "Kind":
        """The kind of the same bytes in a folder."""
        return Kind.BF16 if self == Kind.BF16_DOT else self

    @classmethod
    def of(cls, bits: int, group: int) -> "Kind":
        """The quantised kind. Raises ValueError where there is none."""
        for kind in cls:
            if kind.quantised and kind.bits == bits and kind.group == group:
                return kind
        raise ValueError(f"no format of {bits} bits in groups of {group}")


Array = np.ndarray[Any, Any]
Tag = Any

TAGS: Final[dict[int, Any]] = {
    Kind.BF16: np.uint16(0),
    Kind.F16: np.int16(0),
    Kind.F32: np.float32(0),
    Kind.I8_32: np.int8(5),
    Kind.I8_64: np.int32(6),
    Kind.I8_128: np.int32(7),
    Kind.I4_32: np.uint8(5),
    Kind.I4_64: np.uint32(6),
    Kind.I4_128: np.uint32(7),
    Kind.BF16_DOT: np.uint64(0),
}
ITEM_BYTES: Final[dict[int, int]] = {Kind.BF16: 2, Kind.F16: 2, Kind.F32: 4, Kind.BF16_DOT: 2}
"""Of the kinds that are not quantised."""

STORED_AS: Final[dict[int, Any]] = {
    kind: np.uint8 if kind.quantised else np.float32 if kind == Kind.F32 else np.uint16 for kind in Kind
}
"""The NumPy type that holds the weights."""


def code_bytes(kind: int, k: int) -> int:
    """Bytes of the codes of a quantised row of k weights."""
    return (k + 15) // 16 * 16 if Kind(kind).bits == 8 else (k + 31) // 32 * 16


@functools.cache
def row_bytes(kind: int, k: int) -> int:
    """Bytes of a row of k weights."""
    kind = Kind(kind)
    if not kind.quantised:
        return k * ITEM_BYTES[kind]
    return code_bytes(kind, k) + 2 * -(-k // kind.group)


@dataclass(frozen=True)
class Chunk:
    """Sixteen of the weights that a turn of a loop takes: number `step` of `steps` from element `start` on.

    `start` is a multiple of 16 * steps; `mask` selects lanes, None stands for all.
    """

    start: ln.Value
    step: int
    steps: int
    mask: ln.Value | None


class Format(Protocol):
    """IR generators of one format."""

    @property
    def dots(self) -> Dots | None:
        """How its rows are multiplied by dot-product instructions; None where `load` and `fma` do it."""
        ...

    def load(self, b: ln.Builder, tag: ln.Value, row: ln.Value, k: ln.Value, chunk: Chunk) -> ln.Value:
        """16 weights of the row of k at address `row` as float32 lanes; those outside the mask do not
        matter, but are finite if the row is."""
        ...

    def prefetch(self, b: ln.Builder, row: ln.Value, chunk: Chunk) -> None:
        """Ask for the cache line of a chunk of the row at address `row`, unless another chunk does."""
        ...


def _prefetch(b: ln.Builder, row: ln.Value, chunk: Chunk, bits: int) -> None:
    chunks = 512 // (bits * ln.LANES)  # of a cache line
    if chunk.step % chunks == 0 and chunk.steps > 1:
        at = b.lshr(b.mul(b.add(chunk.start, ln.I64(ln.LANES * chunk.step)), ln.I64(bits)), ln.I64(3))
        ln.prefetch(b, b.add(row, at))


@dataclass(frozen=True)
class Plain:
    """Weights that are widened one by one: their type in memory, and how."""

    element: Any
    widen: Callable[[ln.Builder, ln.Value], ln.Value]
    dots: Dots | None = None

    @property
    def item_bytes(self) -> int:
        return 4 if self.element == ln.F32 else int(self.element.width) // 8

    def prefetch(self, b: ln.Builder, row: ln.Value, chunk: Chunk) -> None:
        _prefetch(b, row, chunk, 8 * self.item_bytes)

    def load(self, b: ln.Builder, tag: ln.Value, row: ln.Value, k: ln.Value, chunk: Chunk) -> ln.Value:
        kind, size = ln.vector(self.element), self.item_bytes
        address = b.add(row, b.mul(chunk.start, ln.I64(size)))
        address = b.add(address, ln.I64(size * ln.LANES * chunk.step))
        if chunk.mask is not None:
            return self.widen(b, ln.load_masked(b, address, kind, chunk.mask))
        return self.widen(b, ln.load(b, address, kind))


@dataclass(frozen=True)
class Bytes:
    """Rows of int8 codes, in groups of `span` or a multiple of it."""

    span: int

    @property
    def dots(self) -> IntegerDots | None:
        return IntegerDots(8, self.span) if HAS_INTEGER_DOT else None

    def prefetch(self, b: ln.Builder, row: ln.Value, chunk: Chunk) -> None:
        _prefetch(b, row, chunk, 8)

    def load(self, b: ln.Builder, tag: ln.Value, row: ln.Value, k: ln.Value, chunk: Chunk) -> ln.Value:
        at = b.add(chunk.start, ln.I64(ln.LANES * chunk.step))
        codes = ln.load(b, b.add(row, at), ln.vector(ln.I8))
        values = b.sitofp(b.sext(codes, ln.vector(ln.I32)), ln.vector(ln.F32))
        size = b.and_(b.add(k, ln.I64(15)), ln.I64(-16))
        return b.fmul(values, ln.splat(b, _scale(b, tag, row, size, chunk, self.span)))


@dataclass(frozen=True)
class Nibbles:
    """Rows of codes of four bits, in groups of `span` or a multiple of it.

    Where the processor can look up 16 numbers at once, a group's 16 possible weights are worked out once.
    """

    span: int

    @property
    def dots(self) -> IntegerDots | None:
        return IntegerDots(4, self.span) if HAS_INTEGER_DOT else None

    def prefetch(self, b: ln.Builder, row: ln.Value, chunk: Chunk) -> None:
        _prefetch(b, row, chunk, 4)

    def load(self, b: ln.Builder, tag: ln.Value, row: ln.Value, k: ln.Value, chunk: Chunk) -> ln.Value:
        wide = ln.vector(ln.I32)
        block = b.lshr(chunk.start, ln.I64(5))
        at = b.add(b.shl(block, ln.I64(4)), ln.I64(16 * (chunk.step // 2)))
        codes = b.zext(ln.load(b, b.add(row, at), ln.vector(ln.I8)), wide)
        if chunk.steps == 1:  # either half: bit 4 of the position says which
            half = b.trunc(b.and_(b.lshr(chunk.start, ln.I64(2)), ln.I64(4)), ln.I32)
            codes = b.lshr(codes, ln.splat(b, half))
        elif chunk.step % 2:
            codes = b.lshr(codes, ln.constant(wide, 4))
        size = b.shl(b.lshr(b.add(k, ln.I64(31)), ln.I64(5)), ln.I64(4))
        scale = _scale(b, tag, row, size, chunk, self.span)
        if ln.HAS_LOOKUP:
            return ln.lookup(b, b.fmul(ln.numbers(range(-8, 8)), ln.splat(b, scale)), codes)
        values = b.uitofp(b.and_(codes, ln.constant(wide, 15)), ln.vector(ln.F32))
        # code * scale has 12 bits and -8 * scale 8: only their sum is rounded, with one instruction or two.
        zero = b.fmul(scale, ln.constant(ln.F32, -8.0))
        return ln.fma(b, values, ln.splat(b, scale), ln.splat(b, zero))


def _scale(b: ln.Builder, tag: ln.Value, row: ln.Value, codes: ln.Value, chunk: Chunk, span: int) -> ln.Value:
    """The scale of a chunk's group as float32; chunks of `span` weights have the very same expression."""
    first = b.add(chunk.start, ln.I64(ln.LANES * chunk.step // span * span))
    group = b.lshr(first, b.zext(tag, ln.I64))
    at = b.add(row, b.add(codes, b.shl(group, ln.I64(1))))
    return b.bitcast(b.shl(b.zext(ln.load(b, at, ln.I16), ln.I32), ln.I32(16)), ln.F32)


_FORMATS: Final[dict[Any, Format]] = {
    types.uint16: Plain(ln.I16, ln.bfloat16_to_float32),
    types.int16: Plain(ln.I16, ln.float16_to_float32),
    types.float32: Plain(ln.F32, lambda _, v: v),
    types.int8: Bytes(32),
    types.int32: Bytes(64),
    types.uint8: Nibbles(32),
    types.uint32: Nibbles(64),
    types.uint64: Plain(ln.I16, ln.bfloat16_to_float32, BFloat16Dots()),
}


def format_of(tag: Any) -> Format:
    """The format that the Numba type of a tag stands for."""
    return _FORMATS[tag]


_DOTS: Final = {kind: format_of(typeof(tag)).dots for kind, tag in TAGS.items()}


@functools.cache
def prepared_row_bytes(kind: int, k: int) -> int:
    """Bytes of a row of k activations, prepared for weights of `kind`; 0 where they are taken as they are."""
    dots = _DOTS[kind]
    return 0 if dots is None else -(-k // dots.block) * dots.size
