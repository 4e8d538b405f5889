"""Requests run by the engine's own service, many together: generations and scores as users get them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coli_server.engine import Engine
from coli_server.engine.api import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    SamplingOptions,
    Score,
    TextChunk,
)
from coli_server.engine.service import EngineService
from coli_server.errors import ModelError
from coli_server.routing import RoutePolicy

TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Continuation:
    """The text's tokens that a request generated (an end token is not one), and how it ended."""

    ids: tuple[int, ...]
    end: Finished


class Served:
    """An engine behind its service. Results come in the order of the requests."""

    def __init__(self, engine: Engine, together: int) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._service = EngineService(lambda: engine, self._take, max_running=together)
        self._service.start()
        self._keys = itertools.count(1)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], policy: RoutePolicy) -> list[Score]:
        """How likely each continuation is behind its context (neither is empty), as token ids."""
        requests = [
            self._request("score", before, len(behind), policy, continuation=tuple(behind))
            for before, behind in pairs
        ]
        scores = [each.end.score for each in self._run(requests)]
        return [score for score in scores if score is not None]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        policy: RoutePolicy,
        sampling: Sequence[SamplingOptions],
    ) -> list[Continuation]:
        """Continue each prompt; `sampling` has the options of each."""
        return self._run(
            [
                self._request("gen", prompt, max_tokens, policy, sampling=options)
                for prompt, options in zip(prompts, sampling, strict=True)
            ]
        )

    def stop(self) -> None:
        """End the service's thread, and close the engine."""
        self._service.stop()

    def _take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self._events.put(event)

    def _request(
        self, kind: Any, prompt: Sequence[int], max_tokens: int, policy: RoutePolicy, **fields: Any
    ) -> GenerationRequest:
        key = next(self._keys)
        return GenerationRequest(key, f"bench/{key}", kind, tuple(prompt), max_tokens, policy, **fields)

    def _run(self, requests: list[GenerationRequest]) -> list[Continuation]:
        for request in requests:
            self._service.submit(request)
        ids: dict[int, list[int]] = {request.key: [] for request in requests}
        ended: dict[int, Finished] = {}
        while len(ended) < len(requests):
            match self._events.get():
                case TextChunk() as chunk:
                    ids[chunk.key] += chunk.ids
                case Finished() as event:
                    ended[event.key] = event
                case Failed() as failed:
                    raise ModelError(f"a request failed: {failed.message}")
        for request in requests:
            self._service.drop(request.session)
        return [Continuation(tuple(ids[request.key]), ended[request.key]) for request in requests]


@contextmanager
def served(engine: Engine, together: int = TOGETHER) -> Iterator[Served]:
    """The engine behind its service; it is closed at the end."""
    running = Served(engine, together)
    try:
        yield running
    finally:
        running.stop()
