"""Looking ahead: while a layer waits for its experts, guess those of the next one and begin to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.moe import MoeBlock
from coli_server.engine.norms import Norm
from coli_server.engine.step import Step
from coli_server.routing import ScoreError

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Pilot:
    """Guesses the choices of one MoE layer from the hidden state of the one before it.

    `norm` and `block` are those of the layer that is guessed. Its router, given the residual stream with
    everything but the previous layer's routed experts, names most of what it will really choose.

    The last quarter of a guess is not read: it is the least certain part, and a wrong read costs as much
    as a right one saves. For the same reason a prefetch does not take the place of an expert that just
    missed the guess.
    """

    norm: Norm
    block: MoeBlock

    def look_ahead(self, hidden: F32, step: Step) -> None:
        """Prefetch for the rows of `step`, whose residual stream is `hidden`, float32 [rows, hidden]."""
        block = self.block
        if block.cache.complete(block.layer):
            return
        k, experts = block.spec.k, block.spec.experts
        try:
            guessed = block.guess(self.norm(hidden), step, max(1, k // 4))
        except ScoreError:  # a guess may fail; the layer itself will say what is wrong
            return
        close = {expert for rows in guessed for expert in np.unique(rows).tolist()}
        sure = by_popularity([rows[:, : k - k // 4] for rows in guessed], experts)
        block.cache.prefetch(block.layer, sure, keep=close)


def by_popularity(guessed: Sequence[I32], experts: int) -> list[int]:
    """The distinct experts of arrays of rows, int32 [rows, n] in rank order: those of most rows first.

    Experts of as many rows come in the order of their best rank.
    """
    counts = np.zeros(experts, np.int64)
    best = np.full(experts, experts)
    for rows in guessed:
        counts += np.bincount(rows.reshape(-1), minlength=experts)
        for rank, column in enumerate(rows.T):
            best[column] = np.minimum(best[column], rank)
    order = np.lexsort((best, -counts))
    return [int(expert) for expert in order[: np.count_nonzero(counts)]]
