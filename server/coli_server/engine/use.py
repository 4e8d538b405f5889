"""Which experts routing uses and which it starves: a picture over the last tokens of every MoE layer."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from coli_server.engine.api import LayerUse
from coli_server.engine.step import RowGroup
from coli_server.routing import Selection

WINDOW = 1000  # tokens

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


class RouteUse:
    """Follows the choices of decoded tokens in every MoE layer, for all requests together."""

    def __init__(self, layers: int, experts: int) -> None:
        self._clock = np.zeros(layers, np.int64)
        self._last = np.full((layers, experts), -WINDOW, np.int64)
        self._runs = np.zeros((layers, experts), np.int64)
        self._longest = np.zeros(layers, np.int64)

    def track(self, layer: int, chosen: I32, true: I32) -> None:
        """Add the tokens of one layer: what ran and what the router itself wanted, int32 [tokens, k] each.

        A run of swaps of an expert is a number of consecutive tokens in which it ran as a substitute.
        """
        self._clock[layer] = _track(
            chosen,
            true,
            self._clock[layer],
            self._last[layer],
            self._runs[layer],
            self._longest[layer : layer + 1],
        )

    def observe(self, slot: int, group: RowGroup, selection: Selection, _: F32) -> None:
        """Take part in routing as a `RouteObserver`."""
        if group.counted is not None:
            self.track(slot, selection.experts[group.counted], selection.true[group.counted])

    def read(self) -> LayerUse:
        """Minimum and median over layers of the distinct experts in the window, and the longest swap run."""
        if not self._clock.any():
            return LayerUse()
        distinct = np.count_nonzero(self._last > self._clock[:, None] - WINDOW, axis=1)
        return LayerUse(int(distinct.min()), float(np.median(distinct)), int(self._longest.max()))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _track(chosen: I32, true: I32, clock: int, last: I64, runs: I64, longest: I64) -> int:
    for t in range(chosen.shape[0]):
        clock += 1
        for r in range(chosen.shape[1]):
            e = chosen[t, r]
            last[e] = clock
            wanted = False
            for s in range(true.shape[1]):
                wanted |= true[t, s] == e
            if not wanted:
                runs[e] = -runs[e] - 1 if runs[e] > 0 else -1  # negative: grown by this very token
        for e in range(len(runs)):
            runs[e] = -runs[e] if runs[e] < 0 else 0
            longest[0] = max(longest[0], runs[e])
    return clock
