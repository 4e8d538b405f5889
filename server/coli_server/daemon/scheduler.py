"""The loop's side of the engine: accepted requests from submission to outcome, and how they are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from coli_server.daemon.latency import Latencies
from coli_server.daemon.sessions import Session
from coli_server.engine.api import (
    EngineSnapshot,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Progress,
    Started,
    TextChunk,
)
from coli_server.protocol.errors import ProtocolError
from coli_server.telemetry.counters import Counters

EarlyEnd = Literal["cancelled", "deadline", "drained"]


class Service(Protocol):
    """What the loop needs of an engine. It may live in a thread, another process or another machine."""

    def submit(self, request: GenerationRequest) -> None: ...

    def cancel(self, key: int, finish: EarlyEnd = "cancelled") -> None: ...

    def forget(self, session: str) -> None: ...

    def drop(self, session: str) -> None: ...

    def snapshot(self) -> EngineSnapshot: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """An accepted request. `ended` gets its last event; `on_text` is called for each piece of the answer.

    `read` of the prompt's tokens and `tokens` of the answer are done. Times are the event loop's.
    """

    request: GenerationRequest
    session: Session
    on_text: Callable[[TextChunk], None]
    ended: asyncio.Future[Finished | Failed]
    submitted: float
    started: float | None = None
    last_token: float | None = None
    read: int = 0
    tokens: int = 0
    cancelled: bool = False


class Scheduler:
    """Requests that wait or run, at most `room` of them, and their outcomes.

    Everything here happens on the event loop between two awaits, so at every instant
    `requests_total` = the sum of outcomes + `running` + `waiting`.
    """

    def __init__(self, service: Service, *, room: int, latencies: Latencies) -> None:
        self._service = service
        self._room = room
        self._latencies = latencies
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._keys = 0
        self._pace = Pace()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.stalled = False
        self.refused = 0
        self.overdue = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unfinished(self) -> int:
        """Requests that were accepted and have no outcome yet."""
        return self.waiting + self.running

    def next_key(self) -> int:
        """A key for a request, unique in the process."""
        self._keys += 1
        return self._keys

    def snapshot(self) -> EngineSnapshot:
        """The engine's newest figures."""
        return self._service.snapshot()

    def check(self) -> None:
        """Raise ProtocolError BUSY or DRAINING when no request would be accepted now."""
        if self.draining:
            raise ProtocolError("DRAINING", "the server is going down and takes no new work")
        if self.stalled:
            raise self.busy("the engine stands still")
        if self.unfinished >= self._room:
            self.refused += 1
            raise self.busy(f"{self.waiting} requests are waiting already")

    def busy(self, message: str) -> ProtocolError:
        """The refusal of a request that may be welcome later."""
        return ProtocolError("BUSY", message, details={"retry_ms": self._pace.interval_ms})

    def submit(
        self, request: GenerationRequest, session: Session, on_text: Callable[[TextChunk], None]
    ) -> Ticket:
        """Accept a request and hand it to the engine. Raises ProtocolError BUSY or DRAINING."""
        self.check()
        ticket = Ticket(request, session, on_text, self._loop.create_future(), self._loop.time())
        self._service.submit(request)
        self._waiting[request.key] = ticket
        self._empty.clear()
        session.outcomes.requests_total += 1
        return ticket

    def count_early(self, session: Session, finish: EarlyEnd) -> None:
        """Count a request that ended before the engine saw it."""
        session.outcomes.requests_total += 1
        _count(session.outcomes, finish)

    def cancel(self, ticket: Ticket, finish: EarlyEnd = "cancelled") -> None:
        """Ask the engine to end a request; its last event still comes. Asking twice asks once."""
        if not ticket.ended.done() and not ticket.cancelled:
            ticket.cancelled = True
            self._service.cancel(ticket.request.key, finish)

    def forget(self, session: Session) -> None:
        """Let the engine forget what it remembers of a session's texts."""
        self._service.forget(session.key)

    def place(self, ticket: Ticket) -> int | None:
        """The place in the queue, from 1; None once the request has left it."""
        if ticket.request.key not in self._waiting:
            return None
        return list(self._waiting).index(ticket.request.key) + 1

    def cancel_all(self, finish: EarlyEnd) -> None:
        """Ask the engine to end everything."""
        for ticket in [*self._running.values(), *self._waiting.values()]:
            self.cancel(ticket, finish)

    def expire(self, now: float, limit: float) -> None:
        """End requests that have waited in the queue for `limit` seconds, as at a deadline."""
        for ticket in list(self._waiting.values()):
            if now - ticket.submitted < limit:
                return  # the others came later
            if not ticket.cancelled:
                self.overdue += 1
                self.cancel(ticket, "deadline")

    def fail_all(self, message: str) -> None:
        """End every request as failed: the engine does not. Should it ever go on, it finds them cancelled."""
        for ticket in [*self._running.values(), *self._waiting.values()]:
            self.cancel(ticket)
            self.dispatch([Failed(ticket.request.key, "INTERNAL", message, Counters())])

    async def emptied(self) -> None:
        """Wait until nothing waits and nothing runs."""
        await self._empty.wait()

    def dispatch(self, events: Iterable[Event]) -> None:
        """Take the events of one engine step to the requests that they belong to."""
        for event in events:
            ticket = self._running.get(event.key) or self._waiting.get(event.key)
            if ticket is not None:
                self._handle(ticket, event)

    def _handle(self, ticket: Ticket, event: Event) -> None:
        now = self._loop.time()
        match event:
            case Started():
                self._waiting.pop(event.key, None)
                self._running[event.key] = ticket
                ticket.started = now
                self._latencies.queue.observe(now - ticket.submitted)
            case Progress():
                ticket.read = event.done
            case TextChunk():
                ticket.tokens += len(event.ids)
                self._time_tokens(ticket, len(event.ids), now)
                ticket.on_text(event)
            case Finished() | Failed():
                self._end(ticket, event, now)

    def _time_tokens(self, ticket: Ticket, tokens: int, now: float) -> None:
        if ticket.last_token is not None:
            for _ in range(tokens):  # several tokens may share a piece, when characters span them
                self._latencies.inter_token_latency.observe((now - ticket.last_token) / tokens)
        else:
            self._latencies.time_to_first_token.observe(now - ticket.submitted)
            if ticket.started is not None:
                self._latencies.prefill.observe(now - ticket.started)
        ticket.last_token = now

    def _end(self, ticket: Ticket, event: Finished | Failed, now: float) -> None:
        self._waiting.pop(event.key, None)
        self._running.pop(event.key, None)
        outcome = event.finish if isinstance(event, Finished) else "error"
        _count(ticket.session.outcomes, outcome)
        if isinstance(event, Finished):
            ticket.session.last = (event, ticket.request.policy)
            if ticket.request.kind != "score" and event.ttft_seconds is not None:
                self._latencies.decode.observe(event.decode_seconds)
        self._latencies.request.observe(now - ticket.submitted)
        self._pace.tick(now)
        ticket.ended.set_result(event)
        if not self.unfinished:
            self._empty.set()


def _count(outcomes: Counters, outcome: str) -> None:
    name = f"requests_{outcome}_total"
    setattr(outcomes, name, getattr(outcomes, name) + 1)


class Pace:
    """How often requests end lately: an exponentially weighted mean, in seconds."""

    _WEIGHT = 0.2
    # A client told to wait for less would only ask in vain; one told to wait for longer might miss a gap.
    _LEAST_MS, _MOST_MS = 100, 10_000

    def __init__(self) -> None:
        self._mean: float | None = None
        self._last: float | None = None

    def tick(self, now: float) -> None:
        """A request ended at `now`."""
        if self._last is not None:
            gap = now - self._last
            self._mean = gap if self._mean is None else self._mean + self._WEIGHT * (gap - self._mean)
        self._last = now

    @property
    def interval_ms(self) -> int:
        """The mean time between two ends, in milliseconds, within what is sensible to tell a client."""
        mean = 1.0 if self._mean is None else self._mean
        return round(min(max(mean * 1000, self._LEAST_MS), self._MOST_MS))
