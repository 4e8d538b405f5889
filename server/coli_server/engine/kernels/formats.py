"""Weight formats: how 16 consecutive weights of a row become 16 float32 lanes.

A kernel is compiled once per format. Numba chooses by argument types, so a format travels as a `tag`, a NumPy
scalar whose type alone matters. A new format is one row in `_FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numba import types

from coli_server.engine.kernels import lanes as ln


class Kind(IntEnum):
    """How weights are stored: bfloat16 or float16 bits in uint16, or float32."""

    BF16 = 0
    F16 = 1
    F32 = 2


Array = np.ndarray[Any, Any]
Tag = Any

TAGS: Final[dict[int, Any]] = {Kind.BF16: np.uint16(0), Kind.F16: np.int16(0), Kind.F32: np.float32(0)}
ITEM_BYTES: Final[dict[int, int]] = {Kind.BF16: 2, Kind.F16: 2, Kind.F32: 4}


@dataclass(frozen=True)
class Format:
    """IR generators of one format: element type in memory and its widening to float32 lanes."""

    element: Any
    widen: Callable[[ln.Builder, ln.Value], ln.Value]

    @property
    def item_bytes(self) -> int:
        return 4 if self.element == ln.F32 else int(self.element.width) // 8

    def load(self, b: ln.Builder, address: ln.Value, mask: ln.Value | None = None) -> ln.Value:
        """16 weights from `address` on as float32; with a mask those it selects, and zeros."""
        kind = ln.vector(self.element)
        raw = ln.load(b, address, kind) if mask is None else ln.load_masked(b, address, kind, mask)
        return self.widen(b, raw)


_FORMATS: Final[dict[Any, Format]] = {
    types.uint16: Format(ln.I16, ln.bfloat16_to_float32),
    types.int16: Format(ln.I16, ln.float16_to_float32),
    types.float32: Format(ln.F32, lambda _, v: v),
}


def format_of(tag: Any) -> Format:
    """The format that the Numba type of a tag stands for."""
    return _FORMATS[tag]
