"""The protocol without I/O: commands in, bytes out; bytes in, events out.

A `Connection` lets one command at a time wait for its first answer, so that an error without an id has one
possible owner. A generation stops waiting at its `ACK`; then it runs beside, told apart by its id.
Whatever bytes come, whole or one by one, the same events come out, and nothing is raised: a connection that
cannot go on says so once, by `Closed` as its last event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coli_client import parser
from coli_client.commands import Command, Request
from coli_client.errors import ColiError, ConnectionLost, ProtocolViolation, ServerError
from coli_client.results import Ack, Chunk, Info, Result

MAX_LINE = 1 << 20
"""Bytes of a reply line. A server's longest line is a chunk with log-probabilities, far below this."""

MAX_REPLY = 1 << 24
"""Bytes of a reply of several lines."""

_CLOSING = frozenset({"TOO_MANY_CLIENTS", "HTTP", "TIMEOUT", "SLOW_READER"})


@dataclass(frozen=True, slots=True)
class Done:
    """The generation ended well. Text and session are not on the line: they are empty in `result`."""

    id: str
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """`ERR`: for the generation `id`, or for the command in order when `id` is `None`."""

    id: str | None
    error: ServerError


@dataclass(frozen=True, slots=True)
class Reply:
    """The whole answer to the command in order, parsed by that command."""

    value: Any


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection cannot be used any more, and why. All that was unanswered failed for this reason."""

    error: ColiError


Event = Ack | Info | Chunk | Done | Failed | Reply | Closed


class Connection:
    """One side of one connection. Not thread-safe."""

    def __init__(self, *, max_line: int = MAX_LINE, max_reply: int = MAX_REPLY) -> None:
        self._max_line = max_line
        self._max_reply = max_reply
        self._waiting: Command[Any] | Request | None = None
        self._running: set[str] = set()
        self._partial = bytearray()
        self._reply: list[str] = []
        self._reply_bytes = 0
        self._error: ColiError | None = None

    @property
    def idle(self) -> bool:
        """True when no command waits for its first answer, so that one may be sent."""
        return self._waiting is None

    @property
    def error(self) -> ColiError | None:
        """Why the connection is closed; `None` while it is not."""
        return self._error

    def closed(self) -> ConnectionLost:
        """The error for using a connection after its end, which names why it ended."""
        error = ConnectionLost(f"the connection is closed ({self._error}); connect() makes a new one")
        error.__cause__ = self._error
        return error

    def owes(self, id: str) -> bool:
        """True while lines of the generation `id` may still come."""
        waiting = self._waiting
        return id in self._running or (isinstance(waiting, Request) and waiting.id == id)

    @property
    def owing(self) -> bool:
        """True while the server owes any answer."""
        return self._waiting is not None or bool(self._running)

    def send(self, command: Command[Any] | Request) -> bytes:
        """The bytes to send for `command`. Needs `idle`; `ValueError` when its id is running already."""
        if self._error is not None:
            raise self.closed()
        if self._waiting is not None:
            raise RuntimeError("a command is waiting for its answer")
        if isinstance(command, Request) and command.id in self._running:
            raise ValueError(f"id={command.id!r} is running on this connection")
        self._waiting = command
        return command.data

    def receive(self, data: bytes) -> list[Event]:
        """The events that `data` completes. After `Closed` there are none, whatever comes."""
        events: list[Event] = []
        head, *tail = data.split(b"\n")
        self._partial += head
        for piece in tail:
            self._take(bytes(self._partial), events)
            self._partial = bytearray(piece)
        if len(self._partial) > self._max_line:
            self._close(ProtocolViolation(f"a reply line has over {self._max_line} bytes"), events)
        return events

    def end(self) -> list[Event]:
        """The server will send nothing more."""
        where = "in the middle of a line" if self._partial else "in the middle of a reply"
        if not self._partial and not self.owing:
            where = "while nothing was asked"
        return self.close(ConnectionLost(f"the server closed the connection {where}"))

    def close(self, error: ColiError) -> list[Event]:
        """Gives the connection up for a reason of this side, such as a timeout."""
        events: list[Event] = []
        self._close(error, events)
        return events

    def _close(self, error: ColiError, events: list[Event]) -> None:
        if self._error is None:
            self._error = error
            events.append(Closed(error))
        self._waiting = None
        self._running.clear()
        self._reply.clear()
        self._partial.clear()

    def _take(self, line: bytes, events: list[Event]) -> None:
        if self._error is not None:
            return
        try:
            if len(line) > self._max_line:
                raise ProtocolViolation(f"a reply line has over {self._max_line} bytes")
            event = self._event(line.decode().removesuffix("\r"))
        except UnicodeDecodeError:
            self._close(ProtocolViolation(f"a reply line is not UTF-8: {line[:80]!r}"), events)
        except ProtocolViolation as error:
            self._close(error, events)
        else:
            if isinstance(event, Closed):
                self._close(event.error, events)
            elif event is not None:
                events.append(event)

    def _event(self, line: str) -> Event | None:
        if self._reply:  # lines of generations never come inside a reply of several lines
            return self._answer(line)
        word, _, rest = line.partition(" ")
        if word == "ERR":
            return self._failure(parser.error(line))
        id, _, rest = rest.partition(" ")
        if word == "ACK" and isinstance(self._waiting, Request) and self._waiting.id == id:
            ack = parser.ack(line, id, rest)
            self._waiting = None
            self._running.add(id)
            return ack
        if word == "INFO":
            return parser.info(id, rest) if id in self._running else None
        if word == "TOK" and id in self._running:
            return parser.chunk(line, id, rest)
        if word == "DONE" and id in self._running:
            result = parser.result(line, id, rest)
            self._running.discard(id)
            return Done(id, result)
        return self._answer(line)

    def _answer(self, line: str) -> Reply | None:
        """One line of the answer to the command in order."""
        command = self._waiting
        if not isinstance(command, Command):
            raise parser.violation("nothing was asked that this answers", line)
        if command.multiline and line != "END":
            self._reply.append(line)
            self._reply_bytes += len(line)
            if self._reply_bytes > self._max_reply:
                raise ProtocolViolation(f"a reply has over {self._max_reply} bytes")
            return None
        reply = Reply(command.parse(self._reply if command.multiline else [line]))
        self._waiting = None
        self._reply = []
        self._reply_bytes = 0
        return reply

    def _failure(self, error: ServerError) -> Failed | Closed:
        """Whose error it is: a generation's by its id, else the waiting command's, else the connection's."""
        waiting = self._waiting
        cancelling = isinstance(waiting, Command) and error.code == "NOT_FOUND"
        if error.id is not None and error.id in self._running and not cancelling:
            self._running.discard(error.id)
            return Failed(error.id, error)
        if waiting is None or error.code in _CLOSING:
            return Closed(error)
        self._waiting = None
        return Failed(waiting.id if isinstance(waiting, Request) else None, error)
