"""Bytes in, commands and errors out. It keeps its place in the stream whatever the bytes are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from coli_server.errors import ConfigurationError
from coli_server.protocol.commands import Command
from coli_server.protocol.errors import ErrorCode, ProtocolError
from coli_server.protocol.parser import parse, request_id
from coli_server.protocol.words import PAYLOAD_WORD, Words, declares_payload, split

Event = Command | ProtocolError

MAX_LINE: Final = 65_536
DEFAULT_PAYLOAD: Final = 1 << 20
# Beyond this a declared payload is not even skipped: reading it would be work for nothing.
MAX_PAYLOAD: Final = 64 << 20

# Enough of a skipped line to recognise " bytes=" across two pieces of it.
_OVERLAP: Final = len(b" bytes=") - 1

_SIZE = re.compile(rb"[0-9]+")
_TLS_HELLO: Final = b"\x16\x03"
_HTTP_METHOD = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|TRACE|PATCH|PRI) (?:/|\*|https?://)")
_HTTP_REQUEST = re.compile(rb"(?:[A-Za-z-]+ (?:/|\*|https?://)[^ ]*|CONNECT [^ ]+) HTTP/[0-9.]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes: of a line without its LF, and of a payload that is kept."""

    line: int = MAX_LINE
    payload: int = DEFAULT_PAYLOAD

    def __post_init__(self) -> None:
        if self.line < 64:
            raise ConfigurationError(f"line limit must be at least 64 bytes, not {self.line}")
        if not 0 <= self.payload <= MAX_PAYLOAD:
            raise ConfigurationError(f"payload limit must be in [0, {MAX_PAYLOAD}], not {self.payload}")


@dataclass(frozen=True, slots=True)
class Pending:
    """What the peer has begun and not finished.

    `received` bytes of it have come so far; `missing` more end a payload (its LF included), nobody knows how
    many end a line.
    """

    kind: Literal["line", "payload"]
    received: int
    missing: int | None = None


class Framer:
    """The receiving half of one connection.

    `feed` takes bytes as they arrive, in pieces of any size, and returns the events that they complete; `end`
    says that no more will come. Each command gives exactly one event. After an error that closes, everything
    else is dropped unread. Time is linear in the bytes fed, memory is bounded by the limits and one piece.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._state: Literal["line", "skip", "payload", "closed"] = "line"
        self._events: list[Event] = []
        self._buffer = bytearray()
        self._start = 0  # where the current line or payload begins in the buffer
        self._searched = 0  # no LF lies between the start and here
        self._dropped = 0  # bytes of the current line or payload that are gone from the buffer
        self._tail: bytes | None = None  # end of a skipped line that may still declare a payload
        self._header = split(b"")  # the line that declared the current payload
        self._size = 0  # of the current payload
        self._first = True
        self._newline = b"\n"

    @property
    def closed(self) -> bool:
        """Whether an error or the end of input has ended the stream."""
        return self._state == "closed"

    @property
    def newline(self) -> bytes:
        """The line end of the first command: replies use the same, as clients of other protocols expect."""
        return self._newline

    @property
    def pending(self) -> Pending | None:
        """The half line or half payload that has been received, or None between commands."""
        received = self._dropped + len(self._buffer) - self._start
        if self._state == "payload":
            return Pending("payload", received, self._size + 1 - received)
        return Pending("line", received) if received else None

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order. After the stream is closed, nothing."""
        if self._state == "closed":
            return []
        self._buffer += data
        while self._advance():
            pass
        del self._buffer[: self._start]
        self._searched = max(0, self._searched - self._start)
        self._start = 0
        return self._take_events()

    def end(self) -> list[Event]:
        """The events of an end of input: a command that was cut short is refused, never executed."""
        if self._state == "payload":
            self._refuse("BAD_REQUEST", "the input ends inside a payload", id=request_id(self._header))
        elif self._state == "skip":
            self._finish_skipping()
        elif self._state == "line" and self._buffer.strip(b" \t\r"):
            self._refuse("BAD_REQUEST", "the last line has no line end")
        self._close()
        return self._take_events()

    def _advance(self) -> bool:
        """Consume one line, one payload or one piece to skip; False when more bytes are needed first."""
        match self._state:
            case "line":
                return self._read_line()
            case "skip":
                return self._skip_line()
            case "payload":
                return self._read_payload()
            case "closed":
                return False

    def _read_line(self) -> bool:
        if self._first and self._buffer.startswith(_TLS_HELLO, self._start):
            return self._refuse("HTTP", "this port does not speak TLS")
        end = self._buffer.find(b"\n", self._searched, self._start + self._limits.line + 1)
        if end < 0:
            self._searched = len(self._buffer)
            return self._searched - self._start > self._limits.line and self._start_skipping()
        line = bytes(self._buffer[self._start : end])
        self._consume(end + 1)
        self._accept_line(line.removesuffix(b"\r"), b"\r\n" if line.endswith(b"\r") else b"\n")
        return True

    def _accept_line(self, line: bytes, newline: bytes) -> None:
        if not line.strip(b" \t"):
            return
        if self._first:
            self._first = False
            self._newline = newline
            if _HTTP_METHOD.match(line) or _HTTP_REQUEST.fullmatch(line):
                self._refuse("HTTP", "this port does not speak HTTP")
                return
        words = split(line)
        if words.broken is not None and PAYLOAD_WORD.search(b" " + words.broken):
            self._refuse_place(words, "a bytes= behind a string without end")
            return
        match words.values("bytes"):
            case []:
                self._parse(words)
            case [size] if _SIZE.fullmatch(size):
                self._start_payload(words, size)
            case [_]:
                self._refuse_place(words, "the length in bytes= must be decimal digits")
            case _:
                self._refuse_place(words, "the option bytes= is given twice")

    def _start_payload(self, words: Words, digits: bytes) -> None:
        significant = digits.lstrip(b"0") or b"0"
        # int() refuses thousands of digits, so the length is looked at first.
        if len(significant) > len(str(MAX_PAYLOAD)) or int(significant) > MAX_PAYLOAD:
            self._refuse(
                "PAYLOAD_TOO_LARGE",
                f"a payload may have at most {MAX_PAYLOAD} bytes",
                close=True,
                id=request_id(words),
            )
            return
        self._state = "payload"
        self._header = words
        self._size = int(significant)

    def _read_payload(self) -> bool:
        keep = self._size <= self._limits.payload
        if not keep:
            self._drop(min(len(self._buffer), self._start + self._size - self._dropped))
        end = self._start + self._size - self._dropped
        if len(self._buffer) <= end:
            return False
        payload = bytes(self._buffer[self._start : end])
        followed = self._buffer[end] == ord("\n")
        self._consume(end + 1)
        self._state = "line"
        if not followed:
            self._refuse_place(self._header, "no LF after the payload")
        elif keep:
            self._parse(self._header, payload)
        else:
            self._refuse(
                "PAYLOAD_TOO_LARGE",
                f"the payload has {self._size} bytes; at most {self._limits.payload} are accepted",
                id=request_id(self._header),
            )
        return True

    def _start_skipping(self) -> bool:
        """Leave a line that is over the limit: look at its first bytes, then drop it to its LF."""
        # Exactly as many bytes whatever has arrived, so that the outcome does not depend on the pieces.
        prefix = bytes(self._buffer[self._start : self._start + self._limits.line + 1])
        if self._first and _HTTP_METHOD.match(prefix):
            return self._refuse("HTTP", "this port does not speak HTTP")
        self._first = False
        declared = declares_payload(prefix)
        if declared == "yes":
            return self._refuse_place(None, "a bytes= in a line over the limit")
        self._tail = prefix[-_OVERLAP:]
        if declared == "no":
            self._refuse_long_line(request_id(split(prefix)))
        self._state = "skip"
        self._drop(self._start + len(prefix))
        return True

    def _skip_line(self) -> bool:
        end = self._buffer.find(b"\n", self._start)
        stop = end if end >= 0 else len(self._buffer)
        if self._tail is not None:
            window = self._tail + self._buffer[self._start : stop]
            if PAYLOAD_WORD.search(window):
                return self._refuse_place(None, "a bytes= in a line over the limit")
            self._tail = window[-_OVERLAP:]
        if end < 0:
            self._drop(stop)
            return False
        self._finish_skipping()
        self._consume(end + 1)
        self._state = "line"
        return True

    def _finish_skipping(self) -> None:
        if self._tail is not None:
            self._refuse_long_line(None)

    def _refuse_long_line(self, id: str | None) -> None:
        self._refuse("LINE_TOO_LONG", f"a line may have at most {self._limits.line} bytes", id=id)
        self._tail = None

    def _parse(self, words: Words, payload: bytes | None = None) -> None:
        try:
            self._events.append(parse(words, payload))
        except ProtocolError as error:
            # As a value it may live for long; its traceback would keep the payload alive.
            self._events.append(error.with_traceback(None))

    def _refuse_place(self, words: Words | None, why: str) -> bool:
        """Refuse a line after which nobody can tell for certain where the next command begins."""
        return self._refuse(
            "BAD_REQUEST", f"{why}; closing", close=True, id=request_id(words) if words else None
        )

    def _refuse(
        self, code: ErrorCode, message: str, *, close: bool | None = None, id: str | None = None
    ) -> bool:
        error = ProtocolError(code, message, close=close, id=id)
        self._events.append(error)
        if error.close:
            self._close()
        return True

    def _consume(self, position: int) -> None:
        """The current line or payload ends before `position`; the next one begins there."""
        self._start = self._searched = position
        self._dropped = 0

    def _drop(self, position: int) -> None:
        """The current line or payload goes on at `position`; what lies before is not kept."""
        self._dropped += position - self._start
        self._start = self._searched = position

    def _close(self) -> None:
        self._state = "closed"
        self._buffer.clear()
        self._consume(0)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
