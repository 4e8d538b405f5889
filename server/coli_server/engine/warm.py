"""Compiling everything that a step runs before the first request waits for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coli_server import routing
from coli_server.engine import kernels
from coli_server.engine.grouping import group_pairs, take_groups, tally
from coli_server.engine.routers import score
from coli_server.engine.spec import Router
from coli_server.engine.use import RouteUse


def warm(router: Router, kinds: Iterable[int]) -> None:
    """Compile, or load from the code cache, all kernels for weights of `kinds`, on the calling thread."""
    kernels.warm(kinds)
    routing.warm()
    logits = np.zeros((1, 2 * router.groups), np.float32)
    score(router, logits, np.zeros(logits.shape[1], np.float32) if router.correction_bias else None)
    chosen = np.zeros((1, 1), np.int32)
    order, starts, wanted = group_pairs(chosen, 1)
    take_groups(order, starts, wanted, 1)
    tally(np.zeros(1, np.uint8), chosen, np.zeros((1, 3), np.int64))
    RouteUse(1, 1).track(0, chosen, chosen)
