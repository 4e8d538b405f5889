"""Which experts a text used, token by token, and how many of them a cache would have missed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.engine.step import RowGroup, Sequence
from coli_server.routing import Selection

F32 = NDArray[np.float32]
Choices = NDArray[np.int16]
"""[tokens, MoE layers, k]: the chosen experts, best rank first."""


class ChoiceTrace:
    """Takes part in routing as an observer, and keeps the choices of the sequences that it follows."""

    def __init__(self, layers: int, k: int) -> None:
        self._shape = (layers, k)
        self._followed: dict[int, Choices] = {}

    def follow(self, sequence: Sequence, tokens: int) -> Choices:
        """The array that will hold the choices for the next `tokens` positions, from 0, of `sequence`."""
        choices = np.full((tokens, *self._shape), -1, np.int16)
        self._followed[id(sequence)] = choices
        return choices

    def observe(self, slot: int, group: RowGroup, selection: Selection, _: F32) -> None:
        for row, span in group.members:
            choices = self._followed.get(id(span.sequence))
            if choices is not None:
                at, count = span.sequence.position, len(span.ids)
                choices[at : at + count, slot] = selection.experts[row : row + count]


@contextmanager
def tracing(engine: Engine) -> Iterator[ChoiceTrace]:
    """A trace that the engine fills as long as the context lasts."""
    trace = ChoiceTrace(len(engine.spec.moe_layers), engine.k)
    engine.model.observers.append(trace)
    try:
        yield trace
    finally:
        engine.model.observers.remove(trace)


def lru_misses(choices: Choices, experts: int, capacity: int) -> int:
    """Lookups, of all layers, that a logical LRU of `capacity` experts a layer misses; it starts empty.

    The rules are those of session scope: a token's experts are looked up together, then touched in rank
    order. So what is resident are the `capacity` experts of the latest uses.
    """
    tokens, layers, k = choices.shape
    border = max(0, experts - capacity)
    last = np.full((layers, experts), -1, np.int64)  # when an expert was last used; -1: never
    rows = np.arange(layers)[:, None]
    misses = 0
    for t in range(tokens):
        oldest = np.partition(last, border, axis=1)[:, border, None]
        used = last[rows, choices[t]]
        misses += int(np.count_nonzero((used < oldest) | (used < 0)))
        last[rows, choices[t]] = t * k + np.arange(k)
    return misses


def belady_misses(choices: Choices, experts: int, capacity: int) -> int:
    """As `lru_misses` under the best possible eviction (Belady): what is used again last goes first.

    Like every cache here it holds all experts of the token that runs, and takes in what it reads.
    """
    tokens, layers, k = choices.shape
    if capacity >= experts:
        return int(sum(len(np.unique(choices[:, layer])) for layer in range(layers)))
    rows = np.arange(layers)[:, None]
    following = np.full((tokens, layers, k), tokens, np.int64)  # when the chosen are used next
    seen = np.full((layers, experts), tokens, np.int64)
    for t in range(tokens - 1, -1, -1):
        following[t] = seen[rows, choices[t]]
        seen[rows, choices[t]] = t
    absent = tokens + 1
    held = np.full((layers, experts), absent, np.int64)  # when a resident is used next
    misses = 0
    for t in range(tokens):
        misses += int(np.count_nonzero(held[rows, choices[t]] == absent))
        held[rows, choices[t]] = -1  # in use: never the victim
        # Ties at the border are between experts that are never used again, or absent.
        order = np.argpartition(held, capacity - 1, axis=1)
        np.put_along_axis(held, order[:, capacity:], absent, axis=1)
        held[rows, choices[t]] = following[t]
    return misses
