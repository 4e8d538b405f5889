"""The daemon as a whole: it listens, watches time, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from coli_server.daemon import listening, scheduler
from coli_server.daemon.connection import LINGER_SECONDS, Connection
from coli_server.daemon.core import Core
from coli_server.daemon.dialogues import Dialogues
from coli_server.daemon.figures import Figures, Identity, starting
from coli_server.daemon.health import Health, Watchdog
from coli_server.daemon.latency import Latencies
from coli_server.daemon.meters import Meters
from coli_server.daemon.options import daemon_options
from coli_server.daemon.prompts import Prompts
from coli_server.daemon.scheduler import Scheduler
from coli_server.daemon.sessions import Sessions
from coli_server.daemon.supervisor import Notifier
from coli_server.daemon.tokens import Tokens
from coli_server.engine import Engine
from coli_server.engine.api import Event
from coli_server.settings import Settings
from coli_server.telemetry.prometheus import MetricsSnapshot

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
    `tokens` are asked for if there are any; with `tls` TCP connections are encrypted; `notifier` hears how
    it goes. `health` may be read at any time.
    """

    def __init__(
        self,
        make_service: MakeService,
        settings: Settings,
        *,
        tokens: Tokens | None = None,
        tls: ssl.SSLContext | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._service = make_service(self._dispatch)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._executor = ThreadPoolExecutor(TOKENIZERS, thread_name_prefix="coli-text")
        self._latencies = Latencies()
        self._tokens = Tokens() if tokens is None else tokens
        self._tls = tls
        self._notifier = Notifier({}) if notifier is None else notifier
        self._watchdog = Watchdog(limit=settings.step_seconds, patience=settings.step_exit_seconds)
        self.health = Health()
        self._connections: set[Connection] = set()
        self._per_address: Counter[str] = Counter()
        self._refused: set[Connection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._engine_failed = asyncio.Event()

    async def start(self, sockets: list[socket.socket]) -> Engine:
        """Load the model, then serve on bound `sockets`. Raises what the engine raises when it cannot."""
        engine = await self._loop.run_in_executor(self._executor, self._service.start)
        self._core = self._assemble(engine)
        self._servers = [await self._listen(one) for one in sockets]
        self._heart = asyncio.create_task(self._beat())
        self.health.started = True
        return engine

    def metrics(self) -> MetricsSnapshot:
        """What Prometheus is told: everything once the model is loaded, before that only that it is not."""
        if not self.health.started:
            return starting(self._started)
        return self._core.figures.metrics()

    def reload(self, tokens: Tokens) -> None:
        """Let other tokens count from now on; clients whose own is not among them are sent away."""
        if self._tokens and not tokens:
            log.error("no tokens are left; the old ones stay")
            return
        self._tokens.replace(tokens)
        for connection in tuple(self._connections):
            connection.check_identity()

    async def until(self, signals: Signals) -> int:
        """Serve until a signal comes, then drain and stop. Returns the exit code of the process."""
        signalled = asyncio.create_task(signals.get())
        died = asyncio.create_task(self._engine_failed.wait())
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
        dialogues = Dialogues(settings.session_dir, self._executor, meters)
        sessions = Sessions(
            limit=settings.max_sessions,
            lifetime=settings.session_seconds,
            on_end=self._service.drop,
            on_forget=dialogues.forget,
        )
        dialogues.restore(sessions, self._loop.time())
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
            health=self.health,
        )
        prompts = Prompts(engine.text, engine.spec.vocab, engine.context_length, self._executor)
        return Core(settings, options, self._tokens, sessions, dialogues, requests, prompts, figures, meters)

    def _dispatch(self, events: tuple[Event, ...]) -> None:
        """Take the events of an engine step; called on the engine's thread."""
        # The engine may still end a step while the loop is being closed: nobody waits for its events then.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._core.scheduler.dispatch, events)

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        if bound.family == socket.AF_UNIX:
            return await self._loop.create_unix_server(
                self._connection, sock=bound, backlog=listening.BACKLOG
            )
        patience = None if self._tls is None else self._settings.half_command_seconds
        return await self._loop.create_server(
            self._connection,
            sock=bound,
            backlog=listening.BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=patience,
        )

    def _connection(self) -> Connection:
        """The protocol object for an accepted connection."""
        return Connection(self._core, self._made, self._closed)

    def _made(self, connection: Connection) -> str | None:
        """Count a new connection, or say why there are too many."""
        meters = self._core.meters
        refusal = self._too_many(connection.address)
        if refusal is not None:
            meters.connections_rejected_total += 1
            self._refused.add(connection)
            return refusal
        self._connections.add(connection)
        if connection.address is not None:
            self._per_address[connection.address] += 1
        self._none_left.clear()
        meters.connections_total += 1
        meters.connections_current += 1
        return None

    def _too_many(self, address: str | None) -> str | None:
        most, most_each = self._settings.max_connections, self._settings.connections_per_address
        if len(self._connections) >= most:
            return f"{most} connections are open already"
        if most_each and address is not None and self._per_address[address] >= most_each:
            self._core.meters.connections_rejected_address_total += 1
            return f"{most_each} connections from {address} are open already"
        return None

    def _closed(self, connection: Connection) -> None:
        if connection in self._refused:
            self._refused.discard(connection)
            return
        self._connections.discard(connection)
        self._core.meters.connections_current -= 1
        if connection.address is not None:
            self._per_address[connection.address] -= 1
            if not self._per_address[connection.address]:
                del self._per_address[connection.address]
        if not self._connections:
            self._none_left.set()

    async def _beat(self) -> None:
        """Look after time for all connections and sessions; lateness of this loop is that of every timer."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(last + TICK_SECONDS - time.monotonic())
            now = time.monotonic()
            self._latencies.event_loop_lag.observe(now - last - TICK_SECONDS)
            try:
                self._look_after_engine(now - last)
                moment = self._loop.time()
                for connection in tuple(self._connections):
                    connection.tick(moment)
                self._core.sessions.sweep(moment)
                if self._settings.queue_seconds:
                    self._core.scheduler.expire(moment, self._settings.queue_seconds)
            except Exception:
                log.exception("looking after connections failed")
            last = now

    def _look_after_engine(self, elapsed: float) -> None:
        """Tell the supervisor that all is well; notice an engine that has ended or stands still."""
        watchdog, requests = self._watchdog, self._core.scheduler
        watchdog.look(elapsed, busy=bool(requests.unfinished), heartbeat=requests.snapshot().heartbeat)
        if watchdog.stalled != self.health.stalled:
            self.health.stalled = requests.stalled = watchdog.stalled
            if watchdog.stalled:
                self._core.meters.engine_stalls_total += 1
                log.error(
                    "a step of the engine takes over %g s: failing what runs", self._settings.step_seconds
                )
                requests.fail_all("the engine stands still")
            else:
                log.warning("the engine goes on")
            self._notifier.status(self.health.reason)
        if watchdog.hopeless:
            self._fail("the engine stands still for too long")
        elif not self._service.alive:
            self._fail("the engine has ended by itself")
        elif not watchdog.stalled:
            self._notifier.alive(time.monotonic())

    def _fail(self, why: str) -> None:
        if not self.health.failed:
            log.critical("%s; stopping", why)
            self.health.failed = True
            self._engine_failed.set()

    async def _drain_unless(self, signals: Signals) -> int:
        """Drain; a second signal ends that at once."""
        drain = asyncio.create_task(self._drain())
        second = asyncio.create_task(signals.get())
        await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            log.warning("%s again: stopping at once", second.result().name)
            drain.cancel()
            await asyncio.wait({drain}, timeout=1.0)  # left alone it would meet what is torn down behind it
            return 128 + second.result()
        second.cancel()
        return await drain

    async def _drain(self) -> int:
        """Take no new work, let what runs finish or end it, say goodbye to every client, stop the engine."""
        requests = self._core.scheduler
        requests.draining = self.health.draining = True
        self._notifier.stopping("draining")
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
        self._notifier.stopping(self.health.reason)
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
