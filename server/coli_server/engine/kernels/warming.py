"""Compiling every kernel, or loading its machine code, before the first request waits for it."""

from collections.abc import Iterable

import numpy as np

from coli_server.engine.kernels.attention import attention
from coli_server.engine.kernels.experts import ExpertShape, experts_ffn
from coli_server.engine.kernels.formats import STORED_AS, Array, Kind, row_bytes
from coli_server.engine.kernels.heads import HeadShape, split_heads
from coli_server.engine.kernels.linear import linear, linear_heads
from coli_server.engine.kernels.norms import add_rms_norm, combine, layer_norm, rms_norm, silu_mul
from coli_server.engine.kernels.rotary import rope


def warm(
    kinds: Iterable[int] = (Kind.BF16, Kind.F32),
    expert_kinds: Iterable[int] | None = None,
    latent: bool = False,
) -> None:
    """Run every kernel once on tiny arrays of the types that the engine passes, on the calling thread.

    `kinds` are those of matrices, `expert_kinds` those of experts and other feed-forward blocks (None: the
    same); `latent` says that attention is over latents, with values as a view of the keys. Only types decide
    what is compiled, so shapes do not matter here.
    """
    matrices = sorted(set(kinds))
    for kind in matrices:
        linear(_zeros(1, 4), _weights(kind), kind)
    for kind in matrices if expert_kinds is None else sorted(set(expert_kinds)):
        _warm_experts(kind)
    row, width = _zeros(1, 4), np.zeros(4, np.float32)
    rms_norm(row, width, 1e-6, row)
    layer_norm(row, width, width, 1e-6, row)
    silu_mul(row, row, row)
    combine(row, _zeros(1, 1), row)
    for interleaved in (False, True):
        rope(_zeros(1, 1, 4), _zeros(1, 2), _zeros(1, 2), interleaved)
    if latent:
        for kind in matrices:
            if not Kind(kind).quantised:
                linear_heads(_zeros(1, 1, 4), _weights(kind)[None], kind)
    keys = _zeros(2, 1, 6)
    values = keys[:, :, :4] if latent else _zeros(2, 1, 4)
    attention(_zeros(1, 1, 6), keys, values, np.zeros(1, np.int32), 1.0)
    add_rms_norm(row, row, np.float32(1), width, 1e-6)
    cache, angle = _zeros(1, 1, 2), _zeros(1, 1)
    bases = np.array([[cache.ctypes.data, cache.ctypes.data]], np.int64)
    split_heads(_zeros(1, 6), HeadShape(1, 1, 2), (angle, angle), np.zeros(1, np.int32), bases)


def _warm_experts(kind: int) -> None:
    size = _weights(kind).nbytes
    slot = np.zeros(3 * size, np.uint8)
    shape = ExpertShape(kind, d=4, f=4, gate_offset=0, up_offset=size, down_offset=2 * size)
    one, start = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    at, scratch = np.array([slot.ctypes.data]), _zeros(1, shape.hidden)
    experts_ffn(_zeros(1, 4), one, start, at, shape, scratch, _zeros(1, 4), one)


def _weights(kind: int) -> Array:
    """Four rows of four weights."""
    item = np.dtype(STORED_AS[kind])
    return np.zeros((4, row_bytes(kind, 4) // item.itemsize), item)


def _zeros(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.zeros(shape, np.float32)
