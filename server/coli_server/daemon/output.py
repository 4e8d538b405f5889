"""The output of one connection: ordered, with back-pressure, a bounded buffer and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from coli_server.daemon.meters import Meters

# Handlers stop producing replies when so many bytes wait, and go on when a quarter of them is left.
HIGH_WATER = 64 * 1024


class Output:
    """Everything that is sent to one client goes through here, in whole lines.

    What waits in a full buffer must reach the kernel within `seconds`, and no write is taken while more than
    `limit` bytes wait (so one long reply may overshoot by its own length); otherwise `on_slow` is called,
    once. Writing after the end of the output, or to a client that is gone, does nothing.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        limit: int,
        seconds: float,
        meters: Meters,
        on_slow: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._limit = limit
        self._seconds = seconds
        self._meters = meters
        self._on_slow: Callable[[], None] | None = on_slow
        self._loop = asyncio.get_running_loop()
        self._written = 0
        self._open = True
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self.last_write = self._loop.time()
        high = min(HIGH_WATER, limit)
        transport.set_write_buffer_limits(high=high, low=high // 4)

    def write(self, data: bytes) -> None:
        """Send `data`, one or more whole lines, without waiting."""
        if not self._open or self._transport.is_closing():
            return
        if self.waiting_bytes > self._limit:
            self._slow()
            return
        self._transport.write(data)
        self._written += len(data)
        self._meters.bytes_out_total += len(data)
        self.last_write = self._loop.time()

    async def drained(self) -> None:
        """Wait until there is room for more, or until nobody listens any more."""
        await self._room.wait()

    @property
    def waiting_bytes(self) -> int:
        """How many bytes have not been handed to the kernel yet."""
        return self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """The transport's buffer is full."""
        self._room.clear()
        if self._timer is None and self._on_slow is not None:
            self._watch()

    def resume(self) -> None:
        """The transport's buffer has room again."""
        self._room.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Send nothing more; what is in the buffer still goes, followed by the end of the stream."""
        if self._open and not self._transport.is_closing() and self._transport.can_write_eof():
            # A peer that has reset the connection is noticed here before the loop hears of it.
            with suppress(OSError):
                self._transport.write_eof()
        self.close()

    def close(self) -> None:
        """Forget the client: whoever waits for room goes on, and later writes do nothing."""
        self._open = False
        self._on_slow = None
        self.resume()

    def _watch(self) -> None:
        newest = self._written
        self._timer = self._loop.call_later(self._seconds, self._check, newest)

    def _check(self, newest: int) -> None:
        self._timer = None
        if self._written - self.waiting_bytes >= newest:
            self._watch()
        else:
            self._slow()

    def _slow(self) -> None:
        if self._on_slow is not None:
            on_slow, self._on_slow = self._on_slow, None
            # Not from inside write(): the caller may be in the middle of its own bookkeeping.
            self._loop.call_soon(on_slow)
