"""The daemon as a whole: it listens, watches time, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from coli_server.daemon import listening, scheduler
from coli_server.daemon.connection import LINGER_SECONDS, Connection
from coli_server.daemon.core import Core
from coli_server.daemon.figures import Figures, Identity
from coli_server.daemon.latency import Latencies
from coli_server.daemon.meters import Meters
from coli_server.daemon.options import daemon_options
from coli_server.daemon.prompts import Prompts
from coli_server.daemon.scheduler import Scheduler
from coli_server.daemon.sessions import Sessions
from coli_server.engine import Engine
from coli_server.engine.api import Event
from coli_server.settings import Settings

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
# Tokenizing releases the interpreter lock: a second thread keeps a short prompt from waiting for a long one.
TOKENIZERS = 2
# How long the engine may take to end what it was asked to end: a step of a large model from a slow disk.
CANCEL_SECONDS = 10.0


class Service(scheduler.Service, Protocol):
    """An engine that works beside the event loop."""

    def start(self) -> Engine: ...

    def stop(self, timeout: float) -> bool: ...

    @property
    def alive(self) -> bool: ...


Signals = asyncio.Queue[signal.Signals]
MakeService = Callable[[Callable[[tuple[Event, ...]], None]], Service]


class Daemon:
    """Serves one model to any number of clients, from `start` until a signal.

    `make_service` gets the function that takes the engine's events, which may be called in any thread.
    """

    def __init__(self, make_service: MakeService, settings: Settings) -> None:
        self._service = make_service(self._dispatch)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._executor = ThreadPoolExecutor(TOKENIZERS, thread_name_prefix="coli-text")
        self._latencies = Latencies()
        self._connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._engine_died = asyncio.Event()

    async def start(self, sockets: list[socket.socket]) -> Engine:
        """Load the model, then serve on bound `sockets`. Raises what the engine raises when it cannot."""
        engine = await self._loop.run_in_executor(self._executor, self._service.start)
        self._core = self._assemble(engine)
        self._servers = [await self._listen(one) for one in sockets]
        self._heart = asyncio.create_task(self._beat())
        return engine

    async def until(self, signals: Signals) -> int:
        """Serve until a signal comes, then drain and stop. Returns the exit code of the process."""
        signalled = asyncio.create_task(signals.get())
        died = asyncio.create_task(self._engine_died.wait())
        try:
            await asyncio.wait({signalled, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await self._give_up()
                return 1
            name = signalled.result().name
            log.info("%s: finishing what runs, up to %g s", name, self._settings.drain_seconds)
            return await self._drain_unless(signals)
        finally:
            signalled.cancel()
            died.cancel()
            self._heart.cancel()
            for server in self._servers:
                server.close()
            for connection in (*self._connections, *self._refused):
                connection.abort()
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _assemble(self, engine: Engine) -> Core:
        settings, options, meters = self._settings, daemon_options(self._settings), Meters()
        sessions = Sessions(
            limit=settings.max_sessions, lifetime=settings.session_seconds, on_end=self._service.drop
        )
        room = settings.max_running + settings.queue_length
        requests = Scheduler(self._service, room=room, latencies=self._latencies)
        figures = Figures(
            Identity(engine.name, engine.model_type, self._started),
            settings,
            options,
            sessions=sessions,
            scheduler=requests,
            meters=meters,
            latencies=self._latencies,
        )
        prompts = Prompts(engine.text, engine.spec.vocab, engine.context_length, self._executor)
        return Core(settings, options, sessions, requests, prompts, figures, meters)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        """Take the events of an engine step; called on the engine's thread."""
        # The engine may still end a step while the loop is being closed: nobody waits for its events then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._core.scheduler.dispatch, events)

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        create = self._loop.create_unix_server if bound.family == socket.AF_UNIX else self._loop.create_server
        return await create(self._connection, sock=bound, backlog=listening.BACKLOG)

    def _connection(self) -> Connection:
        """The protocol object for an accepted connection."""
        meters, most = self._core.meters, self._settings.max_connections
        if len(self._connections) >= most:
            meters.connections_rejected_total += 1
            refusal = f"{most} connections are open already"
            refused = Connection(self._core, self._refused.discard, refuse=refusal)
            self._refused.add(refused)
            return refused
        connection = Connection(self._core, self._closed, refuse=None)
        self._connections.add(connection)
        self._none_left.clear()
        meters.connections_total += 1
        meters.connections_current += 1
        return connection

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._core.meters.connections_current -= 1
        if not self._connections:
            self._none_left.set()

    async def _beat(self) -> None:
        """Look after time for all connections and sessions; lateness of this loop is that of every timer."""
        due = time.monotonic() + TICK_SECONDS
        while True:
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            self._latencies.event_loop_lag.observe(now - due)
            due = now + TICK_SECONDS
            if not self._service.alive:
                self._engine_died.set()
            try:
                moment = self._loop.time()
                for connection in tuple(self._connections):
                    connection.tick(moment)
                self._core.sessions.sweep(moment)
            except Exception:
                log.exception("looking after connections failed")

    async def _drain_unless(self, signals: Signals) -> int:
        """Drain; a second signal ends that at once."""
        drain = asyncio.create_task(self._drain())
        second = asyncio.create_task(signals.get())
        await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            log.warning("%s again: stopping at once", second.result().name)
            return 128 + second.result()
        second.cancel()
        return await drain

    async def _drain(self) -> int:
        """Take no new work, let what runs finish or end it, say goodbye to every client, stop the engine."""
        requests = self._core.scheduler
        requests.draining = True
        await _within(self._settings.drain_seconds, requests.emptied())
        if requests.unfinished:
            log.warning("ending %d requests after the drain time", requests.unfinished)
            requests.cancel_all("drained")
            await _within(CANCEL_SECONDS, requests.emptied())
        if requests.unfinished:
            log.error("the engine does not end %d requests", requests.unfinished)
        # Every connection has deadlines of its own that add up to this.
        await self._say_goodbye(LINGER_SECONDS + self._settings.write_seconds + TICK_SECONDS)
        stopped = await self._loop.run_in_executor(self._executor, self._service.stop, CANCEL_SECONDS)
        return 0 if stopped else 1

    async def _give_up(self) -> None:
        """Without an engine nothing can be answered: say so, and end for a supervisor to start a new one."""
        log.critical("the engine has ended by itself; stopping")
        self._core.scheduler.draining = True
        self._core.scheduler.fail_all("the engine has stopped")
        await self._say_goodbye(LINGER_SECONDS)

    async def _say_goodbye(self, seconds: float) -> None:
        """Let every connection answer what it has received and close, for so long at most."""
        for connection in tuple(self._connections):
            connection.finish()
        await _within(seconds, self._none_left.wait())


async def _within(seconds: float, work: Coroutine[None, None, object]) -> None:
    """Wait for `work`, but not for longer."""
    with suppress(TimeoutError):
        await asyncio.wait_for(work, seconds)
