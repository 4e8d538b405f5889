"""Engines and texts for the measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coli_server.bench.windows import Window
from coli_server.engine import Engine
from support.served import TINY


@pytest.fixture(scope="package")
def tiny() -> Iterator[Engine]:
    """A tiny glm4_moe whose layers hold a quarter of their experts."""
    engine = Engine.open(TINY, experts_per_layer=4, warm=False)
    yield engine
    engine.close()


@pytest.fixture
def windows(tiny: Engine) -> list[Window]:
    """Three windows of 24 random tokens."""
    random = np.random.default_rng(7)
    return [tuple(random.integers(tiny.spec.vocab, size=24).tolist()) for _ in range(3)]


@pytest.fixture(scope="package")
def prose() -> Path:
    """Two pages of English that no model here was made from."""
    return Path(__file__).parents[1] / "data" / "lighthouse.txt"
