"""Every checkpoint of tests/data/models against logits and greedy tokens of an independent implementation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coli_server.engine import Engine
from coli_server.engine.step import Span

MODELS = Path(__file__).parents[1] / "data" / "models"
TOLERANCE = 2e-3  # of logits; the reference is float32 arithmetic on the same bfloat16 weights


@pytest.fixture(scope="module", params=sorted(path.parent.name for path in MODELS.glob("*/expected.npz")))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(family: str) -> dict[str, NDArray[np.generic]]:
    return dict(np.load(MODELS / family / "expected.npz"))


@pytest.fixture(scope="module")
def engine(family: str) -> Iterator[Engine]:
    engine = Engine.open(MODELS / family)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight(family: str, engine: Engine) -> Iterator[Engine]:
    """The same model with the smallest expert cache: K slots a layer."""
    tight = Engine.open(MODELS / family, experts_per_layer=engine.k)
    yield tight
    tight.close()


def read_in_chunks(engine: Engine, ids: NDArray[np.int64], chunk: int) -> NDArray[np.float32]:
    sequence = engine.new_sequence(engine.policy, engine.new_kv(len(ids)))
    rows = []
    for at in range(0, len(ids), chunk):
        part = tuple(int(i) for i in ids[at : at + chunk])
        rows.append(engine.step([Span(sequence, part, prompt=True, length=len(ids), want="all")]))
    return np.concatenate(rows)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_of_a_whole_prompt(
    engine: Engine, expected: dict[str, NDArray[np.generic]], prompt: int
) -> None:
    logits = engine.logits(expected[f"ids_{prompt}"].tolist())
    np.testing.assert_allclose(logits, expected[f"logits_{prompt}"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_greedy_tokens(engine: Engine, expected: dict[str, NDArray[np.generic]], prompt: int) -> None:
    greedy = engine.generate(expected[f"ids_{prompt}"].tolist(), 24, ignore_eos=True)
    assert greedy == expected[f"greedy_{prompt}"].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_change_no_bit(engine: Engine, expected: dict[str, NDArray[np.generic]], chunk: int) -> None:
    ids = expected["ids_2"].astype(np.int64)
    np.testing.assert_array_equal(read_in_chunks(engine, ids, chunk), engine.logits(ids.tolist()))


def test_k_slots_a_layer_change_no_bit(
    engine: Engine, tight: Engine, expected: dict[str, NDArray[np.generic]]
) -> None:
    ids = expected["ids_2"].tolist()
    np.testing.assert_array_equal(tight.logits(ids), engine.logits(ids))
    assert tight.generate(ids, 24, ignore_eos=True) == expected["greedy_2"].tolist()
    assert tight.cache.counters.evictions > 0


def test_a_batch_changes_no_bit(engine: Engine, expected: dict[str, NDArray[np.generic]]) -> None:
    prompts = [expected[f"ids_{i}"].tolist() for i in range(3)]
    sequences = [engine.new_sequence(engine.policy, engine.new_kv(64)) for _ in prompts]
    together = engine.step(
        [
            Span(sequence, tuple(ids), prompt=True, length=len(ids), want="all")
            for sequence, ids in zip(sequences, prompts, strict=True)
        ]
    )
    np.testing.assert_array_equal(together, np.concatenate([engine.logits(ids) for ids in prompts]))
    tokens: list[list[int]] = [[] for _ in prompts]
    last = together[np.cumsum([len(ids) for ids in prompts]) - 1]
    for _ in range(24):
        for generated, row in zip(tokens, last, strict=True):
            generated.append(int(np.argmax(row)))
        last = engine.step(
            [
                Span(sequence, (generated[-1],), prompt=False, length=sequence.position + 1)
                for sequence, generated in zip(sequences, tokens, strict=True)
            ]
        )
    assert tokens == [expected[f"greedy_{i}"].tolist() for i in range(3)]
