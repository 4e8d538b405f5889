"""A bad network between a client and a daemon: a TCP proxy that delays, slices, stalls, cuts and resets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

_BUFFER = 16_384


@dataclass(frozen=True, slots=True)
class Line:
    """What one direction of a connection suffers. The defaults are a perfect line.

    Pieces of at most `slice` bytes arrive after `latency` seconds each, at `bandwidth` bytes a second. After
    `limit` bytes nothing passes any more (`stall`: the connection stays, silent), the stream is ended
    (`end`) or the connection is reset (`reset`). The end of the stream arrives `slow_close` seconds late.
    """

    slice: int = 65_536
    latency: float = 0.0
    bandwidth: float = 0.0
    limit: int | None = None
    then: str = "end"
    slow_close: float = 0.0


@dataclass
class Proxy:
    """Connections to `place` reach the daemon at `target` over the lines `up` (to it) and `down`."""

    target: tuple[str, int]
    up: Line = Line()
    down: Line = Line()
    place: tuple[str, int] = ("", 0)

    def between(self, **changes: Any) -> None:
        """Later connections suffer the same in both directions."""
        self.up, self.down = replace(self.up, **changes), replace(self.down, **changes)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = socket.socket()
        # Small buffers: a line that stalls is felt soon.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        far.setblocking(False)
        await asyncio.get_running_loop().sock_connect(far, self.target)
        far_reader, far_writer = await asyncio.open_connection(sock=far, limit=_BUFFER)
        ways = [
            asyncio.create_task(_carry(reader, far_writer, self.up)),
            asyncio.create_task(_carry(far_reader, writer, self.down)),
        ]
        try:
            await asyncio.gather(*ways)
        except _ResetError:
            for one in (writer, far_writer):
                _reset(one)
        except ConnectionError:
            pass
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            far_writer.close()


class _ResetError(Exception):
    pass


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
    passed = 0
    while data := await reader.read(line.slice):
        if line.limit is not None:
            data = data[: line.limit - passed]
        if line.latency or line.bandwidth:
            await asyncio.sleep(line.latency + (len(data) / line.bandwidth if line.bandwidth else 0.0))
        writer.write(data)
        await writer.drain()
        passed += len(data)
        if passed == line.limit:
            if line.then == "reset":
                raise _ResetError
            if line.then == "stall":
                await asyncio.Event().wait()
            break
    if line.slow_close:
        await asyncio.sleep(line.slow_close)
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    one: Any = writer.get_extra_info("socket")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def proxied(target: tuple[str, int]) -> AsyncIterator[Proxy]:
    """A proxy in front of `target` on a free port of the loopback."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.place = server.sockets[0].getsockname()[:2]
    try:
        yield proxy
    finally:
        server.close()
