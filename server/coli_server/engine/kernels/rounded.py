"""Activations rounded to bfloat16, and products of pairs: an opt-in for weights that are stored in bfloat16.

The instruction of AVX512-BF16 multiplies two pairs of bfloat16 numbers in each of 16 lanes and adds both
products to a float32. It takes and gives denormals as zeros and rounds in a way of its own, so every number
of rows uses it. A row of activations is rounded once and then meets every row of weights.

Measured on Zen 4: 1.7 times the rate of float32 activations where arithmetic is what takes time. The price is
in the rounding: 8 bits of every activation are left, and products err by 1.4 to 1.9e-3 of the largest.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import llvmlite.binding
from llvmlite import ir

from coli_server.engine.kernels import lanes as ln
from coli_server.engine.kernels.dots import Row, load_first
from coli_server.errors import ConfigurationError

_NEEDED: Final = frozenset({"avx512bf16", "avx512bw", "avx512vl"})

HAS_BFLOAT16_DOT: Final = ln.host_features() >= _NEEDED

_HALVES, _LANES, _FLOATS = ln.vector(ln.I16, 32), ln.vector(ln.I32), ln.vector(ln.F32)


class _BFloat(ir.Type):  # type: ignore[misc]
    """The type that the instruction takes, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def check_bfloat16_dots(features: Collection[str] | None = None) -> None:
    """Raise ConfigurationError where the processor, or one with these features, lacks the instruction.

    Without it nothing would be gained for what rounding costs: products would take as long as exact ones.
    """
    if missing := _NEEDED - set(ln.host_features() if features is None else features):
        raise ConfigurationError(
            "COLI_ACTIVATIONS=bfloat16 needs a processor with AVX512-BF16, and this one lacks "
            f"{', '.join(sorted(missing))} (accepted here: float32)"
        )


@dataclass(frozen=True)
class BFloat16Dots:
    """IR generators for rows of bfloat16 weights.

    A prepared row is the rounded activations, zeros up to a whole number of 32. Lane l stands for elements
    2 l and 2 l + 1 of each 32.
    """

    block: int = 32
    size: int = 64
    columns: int = 4

    def prepare(self, b: ln.Builder, x: Sequence[ln.Value], out: ln.Value) -> None:
        """Store 32 activations, two vectors of float32, at address `out`."""
        for half, values in enumerate(x):
            ln.store(b, _round(b, values), b.add(out, ln.I64(32 * half)))

    def weights(self, b: ln.Builder, row: Row, start: ln.Value, rest: ln.Value | None) -> list[ln.Value]:
        """The 32 weights from `start` on; if there are only `rest` of them, zeros behind."""
        return [load_first(b, b.add(row.address, b.shl(start, ln.I64(1))), _HALVES, rest)]

    def add(self, b: ln.Builder, x: ln.Value, weights: list[ln.Value], total: ln.Value) -> ln.Value:
        """`total`, 16 float32, with the products of the prepared block at address `x` added."""
        values = ln.load(b, x, _HALVES)
        if not HAS_BFLOAT16_DOT:  # nobody may choose this there, but it can be tested
            for part in (_odd, _even):
                total = ln.fma(b, part(b, values), part(b, weights[0]), total)
            return total
        operand = ln.vector(_BFloat(), 32) if llvmlite.binding.llvm_version_info >= (16,) else _LANES
        function = ln.declare(b, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [_FLOATS, operand, operand])
        return b.call(function, [total, b.bitcast(values, operand), b.bitcast(weights[0], operand)])


def _round(b: ln.Builder, values: ln.Value) -> ln.Value:
    """The nearest bfloat16 numbers, ties to even, of 16 float32, as int16 [16]; NaN stays NaN."""
    bits = b.bitcast(values, _LANES)
    high = b.lshr(bits, ln.constant(_LANES, 16))
    up = b.add(b.and_(high, ln.constant(_LANES, 1)), ln.constant(_LANES, 0x7FFF))
    nearest = b.lshr(b.add(bits, up), ln.constant(_LANES, 16))
    quiet = b.or_(high, ln.constant(_LANES, 0x40))
    kept = b.select(b.fcmp_unordered("uno", values, values), quiet, nearest)
    return b.trunc(kept, ln.vector(ln.I16))


def _even(b: ln.Builder, halves: ln.Value) -> ln.Value:
    return b.bitcast(b.shl(b.bitcast(halves, _LANES), ln.constant(_LANES, 16)), _FLOATS)


def _odd(b: ln.Builder, halves: ln.Value) -> ln.Value:
    return b.bitcast(b.and_(b.bitcast(halves, _LANES), ln.constant(_LANES, -65536)), _FLOATS)
