"""A scripted server on a real socket, for the byte-level faults that a real server does not make."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

DONE = (
    b"finish=length tokens=2 prompt_tokens=3 seed=0 tok_s=1.0 hit_pct=50.0 lookups=8 mode=stock scope=shared"
)


@dataclass(frozen=True)
class Seen:
    """One command as it arrived."""

    line: bytes
    payload: bytes | None

    @property
    def id(self) -> bytes:
        """The request's id: `id=` of a generation, the word after CANCEL."""
        found = re.search(rb" id=(\S+)", self.line) or re.match(rb"CANCEL (\S+)", self.line)
        assert found, self.line
        return found[1]


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        self._connection = connection
        self._file = connection.makefile("rb")

    def next(self) -> Seen:
        """The next command; an empty line at the end of input."""
        line = self._file.readline().removesuffix(b"\n")
        size = re.search(rb" bytes=(\d+)$", line)
        if not size:
            return Seen(line, None)
        payload = self._file.read(int(size[1]))
        assert self._file.read(1) == b"\n"
        return Seen(line, payload)

    def rest(self) -> bytes:
        """All that comes until the client closes or resets."""
        with contextlib.suppress(ConnectionResetError):
            return self._file.read()
        return b""

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def accept(self) -> bytes:
        """Reads a generation and accepts it; its id."""
        seen = self.next()
        assert seen.line.startswith((b"GEN ", b"CHAT ")), seen
        self.send(b"ACK %b prompt_tokens=3 session=~1\n" % seen.id)
        return seen.id

    def done(self, id: bytes, words: bytes = DONE) -> None:
        self.send(b"DONE %b %b\n" % (id, words))

    def cancelled(self, id: bytes) -> None:
        """Expects the cancellation of `id` and obeys."""
        seen = self.next()
        assert seen.line == b"CANCEL " + id, seen
        self.send(b"OK\n")
        self.done(id, DONE.replace(b"length", b"cancelled"))

    def reset(self) -> None:
        """Closes so that the client gets a reset instead of an end of input."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._file.close()
        self._connection.close()


Script = Callable[[Peer], None]
Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(script, ...) -> port`: the first connection gets the first script, and so on.

    With `path=` it listens on a Unix socket there.

    A script that fails, or that the client leaves waiting, fails the test.
    """
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []
    listeners: list[socket.socket] = []

    def run(listener: socket.socket, scripts: tuple[Script, ...]) -> None:
        try:
            for script in scripts:
                connection, _ = listener.accept()
                peer = Peer(connection)
                try:
                    script(peer)
                finally:
                    peer.close()
        except BaseException as error:
            failures.append(error)

    def start(*scripts: Script, path: str | None = None) -> int:
        if path is None:
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            listener = socket.create_server(path, family=socket.AF_UNIX)
        listener.settimeout(5)
        listeners.append(listener)
        thread = threading.Thread(target=run, args=(listener, scripts), daemon=True)
        threads.append(thread)
        thread.start()
        return 0 if path is not None else int(listener.getsockname()[1])

    yield start
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "the script is still waiting"
    for listener in listeners:
        listener.close()
    if failures:
        raise failures[0]
