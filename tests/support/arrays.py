"""Weights in every stored type, and arrays that end where readable memory ends."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np

from coli_server.engine import kernels
from coli_server.engine.kernels import Kind

Array = np.ndarray[Any, Any]


def stored(values: Array, kind: int) -> Array:
    """`values` as weights of `kind`: float16 rounded, bfloat16 cut off."""
    if kind == Kind.F16:
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, np.float32)
    return bits if kind == Kind.F32 else (bits.view(np.uint32) >> 16).astype(np.uint16)


def widened(weights: Array, kind: int) -> Array:
    """Stored weights as float64."""
    if Kind(kind).stored == Kind.BF16:
        weights = (weights.astype(np.uint32) << 16).view(np.float32)
    return (weights.view(np.float16) if kind == Kind.F16 else weights).astype(np.float64)


def rounded(values: Array) -> Array:
    """float32 `values` as the nearest bfloat16 numbers, ties to even; finite ones only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def error(got: Array, want: Array) -> float:
    """The largest difference, as a share of the largest value that was wanted."""
    scale = float(np.abs(want).max()) or 1.0
    return float(np.abs(got.astype(np.float64) - want).max()) / scale


@contextmanager
def guarded(array: Array) -> Iterator[Array]:
    """A copy whose last byte is the last of a page; the next page can be neither read nor written."""
    page = mmap.PAGESIZE
    size = (array.nbytes + page - 1) // page * page
    region = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = (ctypes.c_char * (size + page)).from_buffer(region)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(ctypes.addressof(whole) + size)
    if libc.mprotect(guard, ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(region, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    yield copy
    if libc.mprotect(guard, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Kernels called on this thread use `count` threads, or as many as there are processors."""
    kernels.setup(min(count, numba.config.NUMBA_NUM_THREADS))
    yield
    kernels.setup(1)
