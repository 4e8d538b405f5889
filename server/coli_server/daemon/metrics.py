"""The metrics port: a few pages over HTTP/1.1, made of what is known already.

`/metrics` is for Prometheus, `/healthz` says whether the process is to go on, `/readyz` whether it is to get
work. One request a connection; bodies are not read. Figures are collected in the event loop, in a moment;
a thread of its own makes the text of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from coli_server.daemon import listening
from coli_server.daemon.health import Health
from coli_server.errors import ConfigurationError
from coli_server.settings import Address, Settings
from coli_server.telemetry.prometheus import CONTENT_TYPE, MetricsSnapshot, exposition

log = logging.getLogger(__name__)

DEFAULT_PORT = 9311
HEAD_BYTES = 8192
# From the connection to its end, come what may: a scraper gives up after ten seconds as a rule.
SECONDS = 10.0
MOST_CONNECTIONS = 64

_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,4000}) HTTP/1\.[01]\r?\n")
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one page says."""

    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT
    headers: Mapping[str, str] | None = None

    def encode(self, *, head_only: bool) -> bytes:
        """The bytes of the whole reply; for HEAD without its body, of which it tells the length."""
        headers = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "Connection": "close",
            **(self.headers or {}),
        }
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        return head if head_only else head + self.body


def bind(settings: Settings) -> list[socket.socket]:
    """The sockets of the metrics port, none when there is to be none.

    Raises ConfigurationError when the port that was asked for is taken. The default one is done without:
    a second daemon on a machine needs no other settings.
    """
    port = DEFAULT_PORT if settings.metrics_port is None else settings.metrics_port
    if port == 0:
        return []
    address = Address(settings.metrics_host, port)
    try:
        return listening.bind_tcp(address)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if settings.metrics_port is None:
            log.warning("no metrics port: cannot listen on %s: %s (COLI_METRICS_PORT)", address, reason)
            return []
        raise ConfigurationError(
            f"COLI_METRICS_PORT is {port}: cannot listen on {address}: {reason}"
        ) from None


class MetricsPort:
    """Serves the pages on bound sockets. `metrics` gives the figures of the moment; it must not block."""

    def __init__(self, health: Health, metrics: Callable[[], MetricsSnapshot]) -> None:
        self._health = health
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="coli-metrics")
        self._servers: list[asyncio.Server] = []
        self.connections: set[HttpConnection] = set()

    async def start(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._servers.append(await loop.create_server(lambda: HttpConnection(self), sock=one))

    def close(self) -> None:
        """Listen no more, and end what is under way."""
        for server in self._servers:
            server.close()
        for connection in tuple(self.connections):
            connection.abort()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def answer(self, path: str) -> Answer:
        """The page at `path`."""
        if path == "/metrics":
            return await self._page()
        if path == "/healthz":
            return self._state(self._health.live)
        if path == "/readyz":
            return self._state(self._health.ready)
        return Answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /healthz and /readyz\n")

    async def _page(self) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(self._executor, exposition, self._metrics())
            return Answer(HTTPStatus.OK, text, CONTENT_TYPE)
        except Exception:
            log.exception("the metrics could not be told")
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the daemon's log says why\n")

    def _state(self, good: bool) -> Answer:
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(status, f"{self._health.reason}\n".encode())


class HttpConnection(asyncio.Protocol):
    """One request and its answer; then the connection is closed, by the client if it does so soon."""

    def __init__(self, port: MetricsPort) -> None:
        self._port = port
        self._head = bytearray()
        self._answered = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self.abort)
        self._port.connections.add(self)
        if len(self._port.connections) > MOST_CONNECTIONS:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._answered or self._task is not None:
            return  # read, so that what is left does not reset the connection before the answer is read
        start = max(len(self._head) - 3, 0)
        self._head += data[: HEAD_BYTES + 1]
        if len(self._head) > HEAD_BYTES:
            self._send(Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the head is too large\n"))
        elif _END_OF_HEAD.search(self._head, start):
            self._respond()

    def eof_received(self) -> bool:
        # A client may end its side and wait for the answer.
        return self._task is not None and not self._answered

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._port.connections.discard(self)

    def abort(self) -> None:
        self._transport.abort()

    def _respond(self) -> None:
        request = _REQUEST.match(self._head)
        if request is None:
            self._send(Answer(HTTPStatus.BAD_REQUEST, b"that is no HTTP/1.1 request\n"))
            return
        method, target = request[1].decode(), request[2].decode()
        if method not in ("GET", "HEAD"):
            allowed = {"Allow": "GET, HEAD"}
            self._send(Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n", headers=allowed))
            return
        path = target.partition("?")[0]
        self._task = asyncio.create_task(self._send_page(path, head_only=method == "HEAD"))

    async def _send_page(self, path: str, *, head_only: bool) -> None:
        self._send(await self._port.answer(path), head_only=head_only)

    def _send(self, answer: Answer, *, head_only: bool = False) -> None:
        self._answered = True
        self._head.clear()
        self._transport.write(answer.encode(head_only=head_only))
        with suppress(OSError, RuntimeError):  # the client may be gone
            self._transport.write_eof()
