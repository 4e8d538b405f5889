"""One client's connection: bytes to commands in order, replies back, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Literal, cast

from coli_server.daemon import answers
from coli_server.daemon.conversation import Conversation
from coli_server.daemon.core import Core
from coli_server.daemon.output import Output
from coli_server.protocol.commands import Command
from coli_server.protocol.errors import ErrorCode, ProtocolError
from coli_server.protocol.framer import Event, Framer, Limits
from coli_server.protocol.replies import with_newline

log = logging.getLogger(__name__)

# Reading stops while commands of so many bytes wait for their turn. It is not one command
# alone: the end of the input lies behind all of them, and tells that the client may be gone.
BACKLOG = 256 * 1024
# What a command or an error without text counts: about what it takes in memory.
COMMAND_COST = 1024
# Bytes are framed in pieces, so that a block of shortest commands does not become many times as much at once.
PIECE = 4096
# How long to read and drop what the peer has sent when the connection closes: closing a socket with unread
# input resets the connection, and the peer may lose the reply that it has not read yet.
LINGER_SECONDS = 2.0
# While requests run and nothing else is sent. Once the input has ended, a failing write is the only sign of
# a client that is gone, so it is tried more often.
INFO_SECONDS = 2.0
INFO_SECONDS_AFTER_END = 1.0
# A machine that vanished is noticed after two minutes, not after the kernel's two hours.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}


# The address of a peer that has gone before anybody looked.
NOWHERE = "0.0.0.0"


class Connection(asyncio.Protocol):
    """The protocol object of one connection.

    `open`: commands are read and answered. `closing`: the output has ended and input is dropped.
    `closed`: the transport is gone. `on_made` is called when the transport can be used (never for a client
    that fails its TLS handshake) and says why the client is refused, if it is; `on_closed` at the end.
    `address` is the peer's, None for a Unix socket.
    """

    def __init__(
        self,
        core: Core,
        on_made: Callable[[Connection], str | None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._core = core
        self._on_made = on_made
        self._on_closed = on_closed
        self.address: str | None = None
        self._loop = asyncio.get_running_loop()
        self._state: Literal["open", "closing", "closed"] = "open"
        limits = Limits(line=core.settings.line_bytes, payload=core.settings.payload_bytes)
        self._framer = Framer(limits)
        self._unframed = bytearray()
        self._waiting: deque[Event] = deque()
        self._backlog = 0
        self._arrived = asyncio.Event()
        self._input_ended = False
        self._all_framed = False
        self._last_call = False
        self._answering = False
        self._flush_seconds = core.settings.write_seconds
        self._opened = self._last_input = self._last_work = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._linger: asyncio.TimerHandle | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        settings = self._core.settings
        self._transport = cast(asyncio.Transport, transport)
        self._output = Output(
            self._transport,
            limit=settings.output_buffer_bytes,
            seconds=settings.write_seconds,
            meters=self._core.meters,
            on_slow=self._slow,
        )
        self.address = _address(transport)
        local = self.address is None or ip_address(self.address).is_loopback
        self._conversation = Conversation(self._core, self._send, local=local)
        _keep_alive(transport)
        refusal = self._on_made(self)
        if refusal is not None:
            self.fail("TOO_MANY_CLIENTS", refusal)
        else:
            self._task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._core.meters.bytes_in_total += len(data)
        if self._state == "open":
            self._last_input = self._loop.time()
            self._unframed += data
            self._frame()

    def eof_received(self) -> bool:
        """The peer sends no more. True keeps the connection open for what is still to be answered."""
        self._input_ended = True
        if self._state == "open" and self._transport.can_write_eof():
            self._frame()
            return True
        # TLS has no half-closed connections: nobody would hear the answers.
        self._close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            log.debug("a client is gone: %s", exc)
        self._state = "closed"
        self._input_ended = True
        self._unframed.clear()
        self._waiting.clear()
        self._arrived.set()
        self._output.close()
        if self._linger is not None:
            self._linger.cancel()
        self._conversation.cancel()
        if self._task is None or self._task.done():
            self._conversation.leave()
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()

    # What the server calls

    def tick(self, now: float) -> None:
        """Look after time, a few times a second: tell of progress, end clients that stand still."""
        if self._state != "open":
            return
        settings = self._core.settings
        if not self._conversation.admitted and now - self._opened >= settings.half_command_seconds:
            self.fail("TIMEOUT", f"no token has come for {settings.half_command_seconds:g} s")
        elif self._answering or self._conversation.busy:
            self._last_work = now
            silence = INFO_SECONDS_AFTER_END if self._input_ended else INFO_SECONDS
            if now - self._output.last_write >= silence:
                self._conversation.tell()
        elif (
            self._framer.pending
            and now - max(self._last_input, self._last_work) >= settings.half_command_seconds
        ):
            what = self._framer.pending.kind
            self._core.meters.half_command_timeouts_total += 1
            self.fail("TIMEOUT", f"half a {what} has stood still for {settings.half_command_seconds:g} s")
        elif settings.idle_seconds and now - max(self._last_input, self._last_work) >= settings.idle_seconds:
            self._core.meters.idle_timeouts_total += 1
            self.fail("TIMEOUT", f"nothing has happened for {settings.idle_seconds:g} s")

    def check_identity(self) -> None:
        """The tokens have changed: a client whose own does not count any more is sent away."""
        if self._conversation.revoked:
            self.fail("AUTH", "the token counts no more")

    def finish(self) -> None:
        """Answer what has been received, then close."""
        self._last_call = True
        self._arrived.set()

    def abort(self) -> None:
        """Close at once; what has not been sent is lost."""
        self._transport.abort()

    def fail(self, code: ErrorCode, message: str) -> None:
        """Say what is wrong, end whatever runs, and close."""
        if self._state == "open":
            self._send(answers.refusal(ProtocolError(code, message), None))
            self.shut()

    def shut(self) -> None:
        """End the output now, drop what still comes in for a moment, then close. What runs is cancelled."""
        if self._state != "open":
            return
        self._state = "closing"
        self._unframed.clear()
        self._waiting.clear()
        self._arrived.set()
        self._conversation.cancel()
        if self._input_ended or not self._transport.can_write_eof():
            self._close()
            return
        self._output.end()
        self._linger = self._loop.call_later(LINGER_SECONDS, self._close)
        self._transport.resume_reading()

    # Commands, one after another

    def _frame(self) -> None:
        """Turn bytes into commands until enough of them wait; then stop reading until they do not."""
        while self._unframed and self._backlog <= BACKLOG:
            self._enqueue(self._framer.feed(bytes(self._unframed[:PIECE])))
            del self._unframed[:PIECE]
        if self._input_ended:
            if not self._unframed:
                self._enqueue(self._framer.end())
                self._all_framed = True
                self._arrived.set()
        elif self._unframed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _enqueue(self, events: list[Event]) -> None:
        for event in events:
            self._waiting.append(event)
            self._backlog += _cost(event)
        if events:
            self._arrived.set()

    async def _serve(self) -> None:
        """Answer commands in their order until there are no more, then close."""
        try:
            while (event := await self._next()) is not None:
                self._answering = True
                await self._answer(event)
                await self._output.drained()
                self._answering = False
            await self._conversation.finished()
            self.shut()
        except Exception:
            log.exception("a connection failed")
            self._transport.abort()
        finally:
            self._conversation.cancel()
            if self._state == "closed":
                self._conversation.leave()

    async def _next(self) -> Event | None:
        """The next command or error; None after the last one."""
        while not self._waiting:
            if self._all_framed or self._last_call or self._state != "open":
                return None
            self._arrived.clear()
            await self._arrived.wait()
        event = self._waiting.popleft()
        self._backlog -= _cost(event)
        if self._unframed and self._backlog <= BACKLOG // 2 and self._state == "open":
            self._frame()
        return event

    async def _answer(self, event: Event) -> None:
        if isinstance(event, Command):
            await self._conversation.answer(event)
            if self._conversation.over:
                self.shut()
            return
        self._count(event)
        self._send(answers.refusal(event, None))
        if event.close:
            self.shut()

    def _count(self, error: ProtocolError) -> None:
        meters = self._core.meters
        meters.protocol_errors_total += 1
        meters.lines_too_long_total += error.code == "LINE_TOO_LONG"
        meters.payloads_too_large_total += error.code == "PAYLOAD_TOO_LARGE"

    def _send(self, block: bytes) -> None:
        self._output.write(with_newline(block, self._framer.newline))

    # The end

    def _slow(self) -> None:
        self._core.meters.slow_readers_total += 1
        self._flush_seconds = 0.0
        self.fail("SLOW_READER", "replies were not read in time")

    def _close(self) -> None:
        """Close once everything in the buffer has been sent, or when the peer takes too long to read it."""
        self._output.close()
        if self._linger is not None:
            self._linger.cancel()
        self._transport.close()
        self._linger = self._loop.call_later(self._flush_seconds, self._transport.abort)


def _cost(event: Event) -> int:
    return COMMAND_COST + (event.size if isinstance(event, Command) else 0)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel ask now and then whether the peer's machine is still there."""
    one = transport.get_extra_info("socket")
    if one.family != socket.AF_UNIX:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            one.setsockopt(socket.IPPROTO_TCP, name, value)


def _address(transport: asyncio.BaseTransport) -> str | None:
    """The peer's address without its port; None for a program on the other end of a Unix socket."""
    if transport.get_extra_info("socket").family == socket.AF_UNIX:
        return None
    peer: Any = transport.get_extra_info("peername")
    return str(peer[0]) if peer is not None else NOWHERE
