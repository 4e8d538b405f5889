"""Compiling everything that a step runs before the first request waits for it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from coli_server import routing
from coli_server.engine import kernels
from coli_server.engine.grouping import group_pairs, take_groups
from coli_server.engine.kernels import ITEM_BYTES, Kind
from coli_server.engine.kernels.unpack import transpose, unpack_mxfp4
from coli_server.engine.routers import score
from coli_server.engine.sparse import choose
from coli_server.engine.spec import LatentAttention, ModelSpec
from coli_server.engine.use import RouteUse


def warm(spec: ModelSpec, kinds: Collection[int]) -> None:
    """Compile, or load from the code cache, what a model runs with weights of `kinds`, on this thread."""
    latent = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention)]
    experts = set(kinds) - ({Kind.BF16} if Kind.BF16_DOT in kinds else set())  # only routers are exact then
    kernels.warm(kinds, experts, latent=bool(latent))
    routing.warm()
    if any(attention.indexer is not None for attention in latent):
        _warm_indexer()
    _warm_unpacking(spec, kinds)
    router = spec.moe.router
    logits = np.zeros((1, 2 * router.groups), np.float32)
    score(router, logits, np.zeros(logits.shape[1], np.float32) if router.correction_bias else None)
    chosen = np.zeros((1, 1), np.int32)
    order, starts, wanted = group_pairs(chosen, np.zeros(1, np.uint8), np.zeros((1, 3), np.int64))
    take_groups(order, starts, wanted, 1)
    RouteUse(1, 1).track(0, chosen, chosen)


def _warm_indexer() -> None:
    """What a sparse indexer calls besides."""
    row, seen = np.zeros((1, 4), np.float32), np.zeros((1, 1, 2), np.float32)
    kernels.linear(row, row, Kind.F32)
    choose(seen, seen[0, :, :1].copy(), np.ones(1, np.int32), np.float32(1), np.zeros((1, 1), np.int32))


def _warm_unpacking(spec: ModelSpec, kinds: Collection[int]) -> None:
    """What the read threads call for experts that are stored in another form."""
    if spec.moe.mxfp4:
        unpack_mxfp4(np.zeros(16, np.uint8), np.zeros(1, np.uint8), np.zeros(32, np.uint16))
    elif spec.moe.expert_bias:
        for item in {ITEM_BYTES[kind] for kind in kinds if kind in ITEM_BYTES}:
            square = np.zeros((2, 2), np.uint16 if item == 2 else np.uint32)
            transpose(square, square.copy())
