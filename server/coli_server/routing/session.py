"""What a request remembers of its own choices: a logical LRU (session scope) and the running span.

Both start empty with each request and are moved by its own tokens alone, so what is chosen with them is
a function of the request and of nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.routing.policy import RoutePolicy
from coli_server.routing.select import Float32, compiled, select


@dataclass(frozen=True, slots=True)
class SessionResidency:
    """One LRU of `capacity` expert ids a layer, with no weights behind it.

    stamps  int64 [layers, experts]: when an expert was last chosen, 0 = not resident
    """

    stamps: NDArray[np.int64]
    capacity: int

    @classmethod
    def empty(cls, layers: int, experts: int, capacity: int) -> SessionResidency:
        """Start with nothing resident; `RoutePolicy.session_capacity` gives the capacity."""
        return cls(np.zeros((layers, experts), np.int64), capacity)

    def row(self, layer: int) -> NDArray[np.bool_]:
        """Return who is resident in one layer: bool [experts], a copy."""
        row: NDArray[np.bool_] = self.stamps[layer] > 0
        return row

    def touch(self, layer: int, experts: NDArray[np.int32]) -> None:
        """Note one token's choice, int32 [k] in rank order: the best is touched first."""
        compiled().touch(self.stamps[layer], experts, self.capacity)

    def copy(self) -> SessionResidency:
        return SessionResidency(self.stamps.copy(), self.capacity)


@dataclass(frozen=True, slots=True)
class SpanMean:
    """The running mean, per layer, of max - min over unmasked experts of what cache-prior ranks by.

    totals  float64 [layers], tokens  int64 [layers]: the sum so far, and of how many
    """

    totals: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @classmethod
    def empty(cls, layers: int) -> SpanMean:
        return cls(np.zeros(layers, np.float64), np.zeros(layers, np.int64))

    def observe(self, layer: int, scores: Float32, logits: Float32 | None = None) -> NDArray[np.float64]:
        """Add tokens in order and return the mean as each of them sees it, itself included.

        scores, logits  float32 [tokens, experts], as `select` takes them
        returns         float64 [tokens], `select`'s `span`; NaN from a logit that is not finite on, which
                        `select` then refuses
        """
        spans = np.empty(len(scores), np.float64)
        compiled().observe_spans(
            np.ascontiguousarray(scores),
            np.ascontiguousarray(scores if logits is None else logits),
            self.totals,
            self.tokens,
            layer,
            spans,
        )
        return spans

    def copy(self) -> SpanMean:
        return SpanMean(self.totals.copy(), self.tokens.copy())


def warm() -> None:
    """Compile routing's kernels, or load them from the code cache, for the dtypes that the engine uses."""
    row = np.zeros((1, 2), np.float32)
    chosen = select(row, row, np.zeros(2, np.bool_), 1, RoutePolicy())
    SessionResidency.empty(1, 2, 1).touch(0, chosen.experts[0])
    SpanMean.empty(1).observe(0, row)
