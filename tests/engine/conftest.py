"""Engine services for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coli_server.engine import Engine
from support.served import TINY, Served


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start services; all of them are stopped at the end of the test."""
    started: list[Served] = []

    def start(folder: Path = TINY, max_running: int = 16, **options: object) -> Served:
        served = Served(
            lambda: Engine.open(folder, warm=False, **options),  # type: ignore[arg-type]
            max_running=max_running,
        )
        started.append(served)
        return served

    yield start
    for served in started:
        assert served.service.stop(30)
