"""Misses of logical caches over a trace of choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.bench.trace import Choices, belady_misses, lru_misses
from coli_server.routing import SessionResidency


def trace(tokens: int, layers: int, experts: int, k: int, seed: int) -> Choices:
    random = np.random.default_rng(seed)
    rows = [random.permutation(experts)[:k] for _ in range(tokens * layers)]
    return np.array(rows, np.int16).reshape(tokens, layers, k)


CASES = st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(2, 6), st.integers(0, 1 << 20))


@given(CASES, st.data())
def test_lru_misses_are_those_of_session_scope(case: tuple[int, ...], data: st.DataObject) -> None:
    tokens, layers, experts, seed = case
    k = data.draw(st.integers(1, experts))
    capacity = data.draw(st.integers(k, experts + 1))
    choices = trace(tokens, layers, experts, k, seed)
    residency = SessionResidency.empty(layers, experts, capacity)
    misses = 0
    for token, layer in itertools.product(range(tokens), range(layers)):
        chosen = choices[token, layer].astype(np.int32)
        misses += int(np.count_nonzero(~residency.row(layer)[chosen]))
        residency.touch(layer, chosen)
    assert lru_misses(choices, experts, capacity) == misses


def least_misses(rows: list[frozenset[int]], capacity: int) -> int:
    """The optimum by trying every set of experts that could be kept behind every token."""
    reachable = {frozenset[int](): 0}
    for row in rows:
        following: dict[frozenset[int], int] = {}
        for held, misses in reachable.items():
            count = misses + len(row - held)
            others = sorted(held - row)
            for size in range(min(len(others), capacity - len(row)) + 1):
                for kept in itertools.combinations(others, size):
                    state = row.union(kept)
                    following[state] = min(following.get(state, count), count)
        reachable = following
    return min(reachable.values())


@given(st.integers(1, 8), st.integers(2, 5), st.integers(0, 1 << 20), st.data())
def test_belady_is_the_optimum(tokens: int, experts: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(3, experts)))
    capacity = data.draw(st.integers(k, experts))
    choices = trace(tokens, 1, experts, k, seed)
    rows = [frozenset(row.tolist()) for row in choices[:, 0]]
    assert belady_misses(choices, experts, capacity) == least_misses(rows, capacity)


@pytest.mark.parametrize("capacity", [2, 5, 8])
def test_layers_add_up(capacity: int) -> None:
    choices = trace(40, 3, 8, 2, seed=3)
    for count in (lru_misses, belady_misses):
        alone = sum(count(choices[:, layer : layer + 1], 8, capacity) for layer in range(3))
        assert count(choices, 8, capacity) == alone
    assert belady_misses(choices, 8, capacity) <= lru_misses(choices, 8, capacity)
