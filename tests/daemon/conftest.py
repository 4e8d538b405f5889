"""A real daemon with a real engine inside the test's own event loop, and clients on real sockets."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coli_server.daemon import listening
from coli_server.daemon.server import Daemon, Signals
from coli_server.daemon.supervisor import Notifier
from coli_server.daemon.tokens import load_tokens
from coli_server.engine import Engine
from coli_server.engine.service import EngineService
from coli_server.engine.store import StoreOptions
from coli_server.settings import Address, Settings

PATIENCE = 20.0  # seconds; only a fault takes so long


def words(line: str) -> dict[str, str]:
    """The `key=value` words of a reply."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


class Client:
    """Lines out, lines in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *lines: str) -> None:
        self.writer.write("".join(f"{line}\n" for line in lines).encode())

    def end(self) -> None:
        """No more commands; what is still to come can be read."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Vanish: the server gets a reset."""
        one: Any = self.writer.get_extra_info("socket")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def line(self) -> str:
        """The next line; empty at the end."""
        data = await asyncio.wait_for(self.reader.readline(), PATIENCE)
        return data.decode().removesuffix("\n")

    async def until(self, start: str) -> list[str]:
        """Lines up to the first one that begins with `start`."""
        lines = [await self.line()]
        while not lines[-1].startswith(start):
            assert lines[-1], f"the connection ended before {start!r}: {lines}"
            lines.append(await self.line())
        return lines

    async def ask(self, command: str) -> str:
        """The one line that answers a command."""
        self.send(command)
        return await self.line()

    async def words(self, start: str) -> dict[str, str]:
        """The `key=value` words of the next line that begins with `start`."""
        return words((await self.until(start))[-1])

    async def rest(self) -> list[str]:
        """All lines up to the end of the connection."""
        data = await asyncio.wait_for(self.reader.read(), PATIENCE)
        self.writer.close()
        return data.decode().splitlines()

    async def stat(self, section: str = "") -> dict[str, str]:
        """The figures of a STAT."""
        self.send(f"STAT {section}")
        lines = await self.until("END")
        return dict(line.split(" ", 2)[1:] for line in lines[:-1])  # type: ignore[misc]


@dataclass
class Running:
    """A daemon that serves. `stop` sends the signal and gives the exit code."""

    daemon: Daemon
    place: tuple[str, int]
    signals: Signals
    ending: asyncio.Task[int]
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.place, limit=2**20))
        self.clients.append(client)
        return client

    def signal(self) -> None:
        self.signals.put_nowait(signal.SIGTERM)

    async def figures_when(self, **expected: str) -> dict[str, str]:
        """All figures, as soon as some of them are as expected."""
        watcher = await self.connect()
        for _ in range(round(PATIENCE / 0.02)):
            figures = await watcher.stat()
            if figures.items() >= expected.items():
                return figures
            await asyncio.sleep(0.02)
        raise AssertionError(f"not {expected}: {figures}")

    async def stop(self) -> int:
        self.signal()
        return await asyncio.wait_for(self.ending, PATIENCE)


Serve = Callable[..., Awaitable[Running]]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every loop that a daemon may run on: they differ in how connections end."""
    factories = {"asyncio": asyncio.new_event_loop}
    if find_spec("uvloop"):
        factories["uvloop"] = import_module("uvloop").new_event_loop
    return factories


@pytest.fixture
async def serve(endless_model: Path) -> AsyncIterator[Serve]:
    """Starts daemons, with any settings as keywords."""
    all_running: list[Running] = []

    async def start(
        model: Path = endless_model,
        slots: int = 6,
        tokens: str = "",
        tls: ssl.SSLContext | None = None,
        notifier: Notifier | None = None,
        **changes: Any,
    ) -> Running:
        settings = replace(Settings(listen=Address("127.0.0.1", 0), drain_seconds=0.0), **changes)
        open_engine = partial(
            Engine.open,
            model,
            experts_per_layer=slots,
            context=settings.context,
            threads=1,
            store=StoreOptions(pilot=settings.pilot),
            warm=False,
        )
        make_service = partial(EngineService, open_engine, max_running=settings.max_running)
        sockets = listening.bind(settings)
        known = load_tokens(None, tokens)
        daemon = Daemon(make_service, settings, tokens=known, tls=tls, notifier=notifier)
        await daemon.start(sockets)
        signals: Signals = asyncio.Queue()
        ending = asyncio.create_task(daemon.until(signals))
        running = Running(daemon, sockets[0].getsockname()[:2], signals, ending)
        all_running.append(running)
        return running

    yield start
    for running in all_running:
        for client in running.clients:
            client.writer.close()
        if not running.ending.done():
            await running.stop()


@pytest.fixture
async def running(serve: Serve) -> Running:
    """A daemon with the settings of the tests."""
    return await serve()


@pytest.fixture
async def client(running: Running) -> Client:
    return await running.connect()
