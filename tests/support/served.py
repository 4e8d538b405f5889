"""A real engine service on a tiny checkpoint, driven by tests."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from coli_server.engine import Engine
from coli_server.engine.api import Event, Failed, Finished, GenerationRequest, TextChunk
from coli_server.engine.service import EngineService
from coli_server.routing import RoutePolicy

MODELS = Path(__file__).parents[1] / "data" / "models"
TINY = MODELS / "glm4_moe"


class Served:
    """An `EngineService` whose events a test can wait for."""

    def __init__(self, open_engine: Callable[[], Engine], **options: int) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.service = EngineService(open_engine, self._take, **options)
        self.engine = self.service.start()
        self.seen: dict[int, list[Event]] = {}
        self._key = 0

    def _take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.events.put(event)

    def request(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> GenerationRequest:
        self._key += 1
        values: dict[str, object] = {"session": "s", "kind": "gen", "policy": RoutePolicy(mode="off")}
        return GenerationRequest(
            key=self._key,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            **{**values, **fields},  # type: ignore[arg-type]
        )

    def submit(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> int:
        request = self.request(prompt, max_tokens, **fields)
        self.service.submit(request)
        return request.key

    def wait(self, key: int, kind: type[Event] | tuple[type[Event], ...] = (Finished, Failed)) -> Event:
        """The first event of `key` that is a `kind`; everything on the way is kept in `seen`."""
        for event in self.seen.get(key, ()):
            if isinstance(event, kind):
                return event
        deadline = time.monotonic() + 60
        while True:
            event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            self.seen.setdefault(event.key, []).append(event)
            if event.key == key and isinstance(event, kind):
                return event

    def finish(self, key: int) -> tuple[Finished, list[int]]:
        """Wait for the end of a request; its closing event and the ids of its text."""
        event = self.wait(key)
        assert isinstance(event, Finished), event
        chunks = [each for each in self.seen[key] if isinstance(each, TextChunk)]
        return event, [token for chunk in chunks for token in chunk.ids]

    def run(self, prompt: list[int], max_tokens: int = 8, **fields: object) -> tuple[Finished, list[int]]:
        return self.finish(self.submit(prompt, max_tokens, **fields))
