"""Rotary position embeddings: reading their configuration and computing angles.

Formulas: RoFormer (arXiv:2104.09864), position interpolation (arXiv:2306.15595), NTK-aware dynamic
scaling and YaRN (arXiv:2309.00071), Llama 3.1's frequency bands, LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.config import Config, ConfigError
from coli_server.engine.spec import RopeSpec

F32 = NDArray[np.float32]

# Parameters that a rope type must have, and those that it may have.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
}
_ALIASES = {"su": "longrope"}
_LONGEST = 1 << 24  # tokens; positions are float32 in the angles


def read_rope(
    config: Config,
    head_dim: int,
    *,
    context_length: int,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    mscales: bool = False,
) -> RopeSpec:
    """The rope of `config`, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`.

    `context_length` is `max_position_embeddings`, `theta` the family's default base, `partial` its default
    share of rotated dimensions (None: a family that always rotates whole heads). `mscales`: `longrope` has
    attention factors of its own for short and for long sequences. Raises ConfigError for an unknown type or
    parameter.
    """
    section = _section(config)
    config.raw("rope_theta")
    where = section if section.has("rope_theta") else config
    base = where.number("rope_theta", theta)
    if base <= 1:
        raise where.error("rope_theta", "a number above 1")
    dim = _rotary_dim(section, config, head_dim, partial)
    section.raw("type")
    kind = str(section.raw("rope_type") or section.raw("type") or "default")
    kind = _ALIASES.get(kind, kind)
    if kind not in _REQUIRED:
        raise section.error("rope_type", ", ".join(_REQUIRED))
    scaling = _read_scaling(section, kind, dim // 2)
    if mscales and kind == "longrope":
        scaling |= {key: section.positive(key) for key in ("short_mscale", "long_mscale")}
    _read_trained_length(section, config, kind, context_length, scaling)
    section.finish(frozenset())
    return RopeSpec(dim, base, kind, interleaved, scaling, context_length)


def _rotary_dim(section: Config, config: Config, head_dim: int, default: float | None) -> int:
    config.raw("partial_rotary_factor")
    where = section if section.has("partial_rotary_factor") else config
    if default is None:
        where.choice("partial_rotary_factor", (1.0, 1), 1.0)
    share = where.number("partial_rotary_factor", default or 1.0, low=0.0, high=1.0)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise where.error("partial_rotary_factor", f"an even share of head_dim={head_dim}, above 0")
    return dim


def _section(config: Config) -> Config:
    """`rope_parameters` or the older `rope_scaling`; a folder that has both must say the same twice."""
    new, old = config.raw("rope_parameters"), config.raw("rope_scaling")
    if new is not None and old is not None and new != old:
        raise config.error("rope_scaling", "null, or the same as rope_parameters")
    return config.section("rope_parameters" if new is not None else "rope_scaling") or Config({})


def _read_scaling(section: Config, kind: str, pairs: int) -> dict[str, object]:
    scaling: dict[str, object] = {}
    for key in _REQUIRED[kind] + _OPTIONAL.get(kind, ()):
        if key in ("short_factor", "long_factor"):
            scaling[key] = _factors(section, key, pairs)
        elif key == "truncate":
            scaling[key] = section.flag(key, True)
        elif section.has(key) or key in _REQUIRED[kind]:
            scaling[key] = section.positive(key)
    if kind == "llama3" and not _number(scaling, "low_freq_factor") < _number(scaling, "high_freq_factor"):
        raise section.error("high_freq_factor", "a number above low_freq_factor")
    return scaling


def _read_trained_length(
    section: Config, config: Config, kind: str, context_length: int, scaling: dict[str, object]
) -> None:
    """`original_max_position_embeddings`: some families have it beside the section, and there it goes first.

    `dynamic` scaling begins at `max_position_embeddings`, and `linear` knows no such length.
    """
    key = "original_max_position_embeddings"
    where = config if config.has(key) else section
    config.raw(key)
    section.raw(key)
    if not where.has(key):
        return
    if "original_max_position_embeddings" in _OPTIONAL.get(kind, ()):
        scaling[key] = where.integer(key, low=2)
    elif kind == "dynamic":
        where.choice(key, (context_length,))


def _factors(section: Config, key: str, pairs: int) -> tuple[float, ...]:
    values = section.raw(key)
    if (
        not isinstance(values, list)
        or len(values) != pairs
        or any(isinstance(v, bool) or not isinstance(v, int | float) or not v > 0 for v in values)
    ):
        raise section.error(key, f"a list of {pairs} numbers above 0")
    return tuple(float(value) for value in values)


def length_threshold(spec: RopeSpec) -> int | None:
    """Sequence length beyond which angles depend on the length itself; None for types where they never do."""
    return _trained_length(spec) if spec.type in ("dynamic", "longrope") else None


def longest_context(spec: RopeSpec) -> int:
    """The longest sequence that the model is made for: some scalings stretch the length it was trained on."""
    length = float(spec.context_length)
    if spec.type == "dynamic":
        length = spec.context_length * _number(spec.scaling, "factor")
    elif spec.type == "yarn":
        length = max(length, _trained_length(spec) * _number(spec.scaling, "factor"))
    return int(min(length, _LONGEST))


def angles(spec: RopeSpec, positions: NDArray[np.int32], lengths: NDArray[np.int32]) -> tuple[F32, F32]:
    """Cosines and sines, each float32 [tokens, dim / 2], scaled by the type's attention factor.

    `lengths[i]` is the length of the sequence that row `i` belongs to; only `dynamic` and `longrope`
    look at it. Products are float32, as in the reference implementations, so that angles round alike.
    """
    threshold = length_threshold(spec)
    if threshold is None or int(lengths.max(initial=0)) <= threshold:
        frequencies, factor = inverse_frequencies(spec, 0)
        theta = positions.astype(np.float32)[:, None] * frequencies[None, :]
        return np.cos(theta) * factor, np.sin(theta) * factor
    cos = np.empty((len(positions), spec.dim // 2), np.float32)
    sin = np.empty_like(cos)
    for length in np.unique(lengths):
        rows = lengths == length
        frequencies, factor = inverse_frequencies(spec, int(length))
        theta = positions[rows].astype(np.float32)[:, None] * frequencies[None, :]
        cos[rows], sin[rows] = np.cos(theta) * factor, np.sin(theta) * factor
    return cos, sin


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[F32, np.float32]:
    """Radians per position, float32 [dim / 2], and the factor on cosines and sines, for `length` tokens."""
    exponents = np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim
    plain = 1.0 / spec.theta**exponents
    scale, factor = plain, 1.0
    match spec.type:
        case "linear":
            scale = plain / _number(spec.scaling, "factor")
        case "dynamic":
            scale = _dynamic(spec, length, exponents)
        case "yarn":
            scale, factor = _yarn(spec, plain)
        case "llama3":
            scale = _llama3(spec, plain)
        case "longrope":
            scale, factor = _longrope(spec, length, plain)
    return scale.astype(np.float32), np.float32(factor)


def _number(scaling: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = scaling.get(key, default)
    if not isinstance(value, int | float):
        raise ConfigError(f"rope parameter {key} is missing")
    return float(value)


def _trained_length(spec: RopeSpec) -> int:
    """Tokens that the model saw in training before its context was extended."""
    return int(_number(spec.scaling, "original_max_position_embeddings", spec.context_length))


def _dynamic(spec: RopeSpec, length: int, exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    trained, factor = spec.context_length, _number(spec.scaling, "factor")
    stretch = factor * max(length, trained) / trained - (factor - 1.0)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2)) if spec.dim > 2 else spec.theta
    return cast("NDArray[np.float64]", 1.0 / theta**exponents)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(spec: RopeSpec, plain: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    scaling = spec.scaling
    factor = _number(scaling, "factor")
    trained = _trained_length(spec)

    def rotations_dim(rotations: float) -> float:
        return spec.dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = rotations_dim(_number(scaling, "beta_fast", 32.0))
    high = rotations_dim(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # the ramp divides by the difference
    ramp = np.clip((np.arange(spec.dim // 2) - low) / (high - low), 0.0, 1.0)
    blended = plain / factor * ramp + plain * (1.0 - ramp)
    attention = scaling.get("attention_factor")
    if attention is None and "mscale" in scaling and "mscale_all_dim" in scaling:
        attention = yarn_mscale(factor, _number(scaling, "mscale")) / yarn_mscale(
            factor, _number(scaling, "mscale_all_dim")
        )
    return blended, float(cast("float", attention)) if attention is not None else yarn_mscale(factor)


def _llama3(spec: RopeSpec, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    factor = _number(spec.scaling, "factor")
    low, high = _number(spec.scaling, "low_freq_factor"), _number(spec.scaling, "high_freq_factor")
    trained = _trained_length(spec)
    wavelength = 2 * math.pi / plain
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 - smooth) * plain / factor + smooth * plain


def _longrope(spec: RopeSpec, length: int, plain: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    scaling = spec.scaling
    trained = _trained_length(spec)
    long = length > trained
    stretch = np.asarray(scaling["long_factor" if long else "short_factor"], np.float64)
    mscale = scaling.get("long_mscale" if long else "short_mscale")
    if mscale is not None:
        return plain / stretch, float(cast("float", mscale))
    if "attention_factor" in scaling:
        return plain / stretch, _number(scaling, "attention_factor")
    factor = _number(scaling, "factor", spec.context_length / trained)
    attention = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
    return plain / stretch, attention
