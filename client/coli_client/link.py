"""The asyncio transport of one connection: a queue of commands, and one stream of events a generation.

Everything here runs on the event loop and never awaits, so no two steps interleave.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from coli_client import commands
from coli_client.commands import Command, Request
from coli_client.connection import Closed, Connection, Done, Event, Failed, Reply
from coli_client.errors import ColiError, ConnectionLost, Timeout
from coli_client.results import Ack, Chunk, Info
from coli_client.transcript import Transcript

HIGH_WATER = 64
"""Unread events of one generation above which no more is read, unless someone waits for an answer."""


class Stream:
    """One generation on a link: its transcript, and the events that its reader has not taken yet."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.transcript = Transcript(request.id)
        self.unread: deque[Chunk | Info] = deque()
        self.abandoned = False
        self.cancelled = False
        self.waiters: list[asyncio.Future[None]] = []

    @property
    def ended(self) -> bool:
        return self.transcript.ended

    def take(self, event: Event) -> None:
        kept = self.transcript.take(event)
        if kept is not None and not self.abandoned:
            self.unread.append(kept)
        self.wake()

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class Call:
    """A command in order, and who waits for its answer: a future, or nobody when it cancels a stream."""

    def __init__(
        self,
        command: Command[Any],
        future: asyncio.Future[Any] | None = None,
        cancels: Stream | None = None,
    ) -> None:
        self.command = command
        self.future = future
        self._cancels = cancels

    @property
    def pointless(self) -> bool:
        """True when it need not be sent any more: its caller gave up, or the stream ended by itself."""
        given_up = self.future is not None and self.future.done()
        return given_up or (self._cancels is not None and self._cancels.ended)

    def settle(self, value: Any = None, error: ColiError | None = None) -> None:
        if self.future is None or self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class Link(asyncio.Protocol):
    """Runs commands one after another and generations side by side over one transport.

    Reading stops while some generation has `HIGH_WATER` unread events, so a slow reader holds the server back
    instead of filling memory. It goes on while anyone waits for an answer: a reader that asks for figures in
    the middle of its generation, or a second generation, never waits for what is not being read.
    """

    def __init__(self, timeout: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._core = Connection()
        self._transport: asyncio.Transport | None = None
        self._queue: deque[Call | Stream] = deque()
        self._waiting: Call | None = None
        self._streams: dict[str, Stream] = {}
        self._reading = True
        self._heard = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self.gone: asyncio.Future[None] = self.loop.create_future()

    @property
    def error(self) -> ColiError | None:
        return self._core.error

    def call(self, command: Command[Any]) -> asyncio.Future[Any]:
        """Queues a command; the future gets its value or its error."""
        future: asyncio.Future[Any] = self.loop.create_future()
        self._enqueue(Call(command, future))
        return future

    def open(self, request: Request) -> Stream:
        """Queues a generation. `ValueError` when its id is in use on this connection."""
        if request.id in self._streams:
            raise ValueError(f"id={request.id!r} is running on this connection")
        stream = Stream(request)
        self._streams[request.id] = stream
        try:
            self._enqueue(stream)
        except ConnectionLost:
            del self._streams[request.id]
            raise
        return stream

    def cancel(self, stream: Stream) -> None:
        """Has the server end this generation; its last events still arrive. Nothing after its end."""
        if stream.ended or stream.cancelled:
            return
        stream.cancelled = True
        if stream in self._queue:
            self._queue.remove(stream)
            del self._streams[stream.request.id]
            stream.transcript.withdraw()
            stream.wake()
        else:
            self._queue.appendleft(Call(commands.cancel(stream.request.id), cancels=stream))
            self._pump()

    def abandon(self, stream: Stream) -> None:
        """As `cancel`, for a stream that nobody will read: its events are dropped as they come."""
        stream.abandoned = True
        stream.unread.clear()
        self.cancel(stream)
        self._adjust_reading()

    async def news(self, stream: Stream) -> None:
        """Returns when something happened to `stream`."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        stream.waiters.append(waiter)
        self._adjust_reading()
        try:
            await waiter
        finally:
            if waiter in stream.waiters:
                stream.waiters.remove(waiter)

    def read(self, stream: Stream) -> Chunk | Info:
        """Takes the oldest unread event of `stream`; there must be one."""
        event = stream.unread.popleft()
        self._adjust_reading()
        return event

    def close(self, error: ColiError) -> None:
        """Ends the connection; everything unfinished on it fails with `error`."""
        self._handle(self._core.close(error))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._handle(self._core.receive(data))

    def eof_received(self) -> None:
        self._handle(self._core.end())

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._handle(self._core.end())
        else:
            self.close(ConnectionLost(f"the connection broke: {error}"))
        if not self.gone.done():
            self.gone.set_result(None)

    def _enqueue(self, entry: Call | Stream) -> None:
        if self._core.error is not None:
            raise self._core.closed()
        self._queue.append(entry)
        self._pump()

    def _pump(self) -> None:
        """Sends the next command if the one before it has been answered."""
        while self._queue and self._core.idle and self._core.error is None:
            entry = self._queue.popleft()
            if isinstance(entry, Stream):
                self._send(entry.request)
            elif not entry.pointless:
                self._waiting = entry
                self._send(entry.command)
        self._adjust_reading()

    def _send(self, command: Command[Any] | Request) -> None:
        assert self._transport is not None
        self._heard = self.loop.time()
        # No need to wait for the transport to drain: the next command waits for this one's answer.
        self._transport.write(self._core.send(command))
        self._watch()

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Reply(value):
                    self._answered().settle(value)
                case Failed(None, error):
                    self._answered().settle(error=error)
                case Ack(id) | Info(id) | Chunk(id):
                    self._streams[id].take(event)
                case Done(id) | Failed(str(id)):
                    self._streams.pop(id).take(event)
                case Closed(error):
                    self._shut(event)
        self._pump()

    def _answered(self) -> Call:
        call, self._waiting = self._waiting, None
        assert call is not None
        return call

    def _shut(self, closed: Closed) -> None:
        calls = [self._waiting, *self._queue]
        self._waiting = None
        self._queue.clear()
        for call in calls:
            if isinstance(call, Call):
                call.settle(error=closed.error)
        for stream in self._streams.values():
            stream.take(closed)
        self._streams.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None and not self._transport.is_closing():
            # The server cancels what runs here now, instead of when its next write fails.
            self._transport.write(commands.QUIT)
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._transport.close()

    def _adjust_reading(self) -> None:
        wanted = (
            not self._core.idle
            or any(stream.waiters for stream in self._streams.values())
            or all(len(stream.unread) < HIGH_WATER for stream in self._streams.values())
        )
        if self._transport is None or self._transport.is_closing() or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._heard = self.loop.time()
            self._transport.resume_reading()
            self._watch()
        else:
            self._transport.pause_reading()

    def _watch(self) -> None:
        if self._timeout is not None and self._watchdog is None:
            self._watchdog = self.loop.call_at(self._heard + self._timeout, self._check_silence)

    def _check_silence(self) -> None:
        self._watchdog = None
        if not self._core.owing or not self._reading:
            return
        assert self._timeout is not None
        if self.loop.time() < self._heard + self._timeout:
            self._watch()
        else:
            self.close(Timeout(f"the server was silent for {self._timeout} s while it owed an answer"))
