"""LLVM IR building blocks: vectors of 16 float32 lanes and the one order in which they are summed.

Everything here takes an llvmlite `IRBuilder` and gives IR values; nothing here runs. Only portable vector
instructions and `llvm.fma` are emitted, so LLVM lowers the same code to AVX-512, AVX2, SSE or NEON.
"""

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import config

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

Builder = Any
Value = Any


def host_features() -> frozenset[str]:
    """The processor features that Numba compiles for."""
    if config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
    features = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, present in features.items() if present)


HAS_FMA = platform.machine() in ("aarch64", "arm64") or "fma" in host_features()
HAS_HALF_CONVERSION = platform.machine() in ("aarch64", "arm64") or "f16c" in host_features()

HAS_LOOKUP = "avx512f" in host_features()


def vector(element: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(element, lanes)


def constant(kind: Any, value: float | int) -> Value:
    """A constant of a scalar type, or of a vector type with the value in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def declare(b: Builder, name: str, result: Any, arguments: Sequence[Any]) -> Value:
    existing = b.module.globals.get(name)
    return existing or ir.Function(b.module, ir.FunctionType(result, arguments), name)


def pointer(b: Builder, address: Value, element: Any) -> Value:
    return b.inttoptr(address, element.as_pointer())


def load(b: Builder, address: Value, kind: Any) -> Value:
    """Load a scalar or a vector; a vector need only be aligned as its elements are."""
    return b.load(pointer(b, address, kind), align=_element_bytes(kind))


def store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, pointer(b, address, value.type), align=_element_bytes(value.type))


def prefetch(b: Builder, address: Value) -> None:
    """Ask for the cache line at an address, which need not be readable, to be brought to the second cache."""
    where = pointer(b, address, I8)
    function = declare(b, "llvm.prefetch.p0", ir.VoidType(), [where.type, I32, I32, I32])
    b.call(function, [where, I32(0), I32(2), I32(1)])


def load_masked(b: Builder, address: Value, kind: Any, mask: Value) -> Value:
    """Load the lanes that `mask` selects, zero in the others; no other byte is touched."""
    name = f"llvm.masked.load.{_mangled(kind)}.p0"
    where = pointer(b, address, kind)
    function = declare(b, name, kind, [where.type, I32, mask.type, kind])
    return b.call(function, [where, I32(_element_bytes(kind)), mask, constant(kind, 0)])


def store_masked(b: Builder, value: Value, address: Value, mask: Value) -> None:
    """Store the lanes that `mask` selects; no other byte is touched."""
    name = f"llvm.masked.store.{_mangled(value.type)}.p0"
    where = pointer(b, address, value.type)
    function = declare(b, name, ir.VoidType(), [value.type, where.type, I32, mask.type])
    b.call(function, [value, where, I32(_element_bytes(value.type)), mask])


def first_lanes(b: Builder, count: Value, lanes: int = LANES) -> Value:
    """A mask of the first `count` lanes (int64)."""
    numbers = ir.Constant(vector(I32, lanes), list(range(lanes)))
    return b.icmp_signed("<", numbers, splat(b, b.trunc(count, I32), lanes))


def splat(b: Builder, value: Value, lanes: int = LANES) -> Value:
    empty = ir.Constant(vector(value.type, lanes), ir.Undefined)
    return shuffle(b, b.insert_element(empty, value, I32(0)), None, [0] * lanes)


def shuffle(b: Builder, first: Value, second: Value | None, lanes: Sequence[int]) -> Value:
    other = ir.Constant(first.type, ir.Undefined) if second is None else second
    return b.shuffle_vector(first, other, ir.Constant(vector(I32, len(lanes)), list(lanes)))


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once where the processor can (elsewhere LLVM would call libm lane by lane)."""
    if not HAS_FMA:
        return b.fadd(b.fmul(x, y), z)
    return b.call(declare(b, f"llvm.fma.{_mangled(x.type)}", x.type, [x.type] * 3), [x, y, z])


def lookup(b: Builder, table: Value, indices: Value) -> Value:
    """Lane i is the entry of `table`, 16 float32, that the low four bits of `indices`, 16 int32, name.

    Only where HAS_LOOKUP.
    """
    kind = vector(F32)
    function = declare(b, "llvm.x86.avx512.permvar.sf.512", kind, [kind, vector(I32)])
    return b.call(function, [table, indices])


def numbers(values: Sequence[float]) -> Value:
    """A constant vector of float32."""
    return ir.Constant(vector(F32, len(values)), [ir.Constant(F32, float(v)) for v in values])


def larger(b: Builder, x: Value, y: Value) -> Value:
    """The larger lane of two; `x` where either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), y, x)


def fold(b: Builder, v: Value, combine: Callable[[Builder, Value, Value], Value]) -> Value:
    """Combine all lanes of a vector: lane l with l + 8, then + 4, + 2, + 1."""
    while (half := v.type.count // 2) > 0:
        low = shuffle(b, v, None, range(half))
        v = combine(b, low, shuffle(b, v, None, range(half, 2 * half)))
    return b.extract_element(v, I32(0))


def sum_lanes(b: Builder, v: Value) -> Value:
    return fold(b, v, lambda b, x, y: b.fadd(x, y))


def sum_four(b: Builder, vectors: Sequence[Value]) -> Value:
    """The sums of four vectors as <4 x float>, each by the very tree of `sum_lanes`."""
    a, c = (_pairwise(b, vectors[i], vectors[i + 1], 8) for i in (0, 2))
    low, high = (
        [16 * side + 8 * v + half + lane for side in (0, 1) for v in (0, 1) for lane in range(4)]
        for half in (0, 4)
    )
    v = b.fadd(shuffle(b, a, c, low), shuffle(b, a, c, high))
    for step in (2, 1):
        low = [2 * step * i + lane for i in range(4) for lane in range(step)]
        v = b.fadd(shuffle(b, v, None, low), shuffle(b, v, None, [lane + step for lane in low]))
    return v


def exp(b: Builder, x: Value) -> Value:
    """e ** x in every lane, within 2 units in the last place; 0 below -104, inf above 88.8, NaN for NaN.

    x = n ln 2 + r, a polynomial in r, and 2 ** n multiplied in two halves, so that both ends of the range
    overflow and underflow by themselves.
    """
    kind, integers = x.type, vector(I32, x.type.count)
    x = b.select(b.fcmp_ordered(">", x, constant(kind, 89.0)), constant(kind, 89.0), x)
    x = b.select(b.fcmp_ordered("<", x, constant(kind, -104.0)), constant(kind, -104.0), x)
    rounder = constant(kind, 12582912.0)  # adding 1.5 * 2 ** 23 leaves the nearest integer in the low bits
    shifted = fma(b, x, constant(kind, 1.44269502162933349609375), rounder)
    n = b.fsub(shifted, rounder)
    exponent = b.sub(b.bitcast(shifted, integers), b.bitcast(rounder, integers))
    r = fma(b, n, constant(kind, -0.693359375), x)
    r = fma(b, n, constant(kind, 2.12194440e-4), r)
    p = constant(kind, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = fma(b, p, r, constant(kind, coefficient))
    p = b.fadd(fma(b, p, b.fmul(r, r), r), constant(kind, 1.0))
    half = b.ashr(exponent, constant(integers, 1))
    for part in (half, b.sub(exponent, half)):
        power = b.shl(b.add(part, constant(integers, 127)), constant(integers, 23))
        p = b.fmul(p, b.bitcast(power, kind))
    return p


def bfloat16_to_float32(b: Builder, bits: Value) -> Value:
    wide = vector(I32, bits.type.count)
    return b.bitcast(b.shl(b.zext(bits, wide), constant(wide, 16)), vector(F32, bits.type.count))


def float16_to_float32(b: Builder, bits: Value, native: bool = HAS_HALF_CONVERSION) -> Value:
    """Widen float16 bits; by integer arithmetic where the processor cannot (LLVM would call a library)."""
    lanes = bits.type.count
    if native:
        return b.fpext(b.bitcast(bits, vector(F16, lanes)), vector(F32, lanes))
    kind, wide = vector(F32, lanes), vector(I32, lanes)
    bits = b.zext(bits, wide)
    sign = b.shl(b.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
    magnitude = b.shl(b.and_(bits, constant(wide, 0x7FFF)), constant(wide, 13))
    # The exponent is 112 too low; multiplying corrects it and normalises denormals. Infinity and NaN stay.
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, kind), constant(kind, 2.0**112)), wide)
    special = b.icmp_unsigned(">=", magnitude, constant(wide, 0x7C00 << 13))
    magnitude = b.select(special, b.or_(magnitude, constant(wide, 0x7F800000)), finite)
    return b.bitcast(b.or_(magnitude, sign), kind)


_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _pairwise(b: Builder, x: Value, y: Value, half: int) -> Value:
    low = [*range(half), *range(16, 16 + half)]
    return b.fadd(shuffle(b, x, y, low), shuffle(b, x, y, [lane + half for lane in low]))


def _element_bytes(kind: Any) -> int:
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    return element.width // 8 if isinstance(element, ir.IntType) else {F16: 2, F32: 4}[element]


def _mangled(kind: Any) -> str:
    """The name of a type inside the name of an overloaded intrinsic."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_mangled(kind.element)}"
    return f"i{kind.width}" if isinstance(kind, ir.IntType) else {F16: "f16", F32: "f32"}[kind]
