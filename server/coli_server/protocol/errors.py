"""The closed table of error codes and the one class that a refused input becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from coli_server.errors import ColiError

ErrorCode = Literal[
    "BAD_REQUEST",
    "UNKNOWN_VERB",
    "BAD_OPTION",
    "BAD_UTF8",
    "DUPLICATE_ID",
    "NOT_FOUND",
    "LINE_TOO_LONG",
    "PAYLOAD_TOO_LARGE",
    "CONTEXT_EXCEEDED",
    "BUSY",
    "AUTH",
    "FORBIDDEN",
    "TOO_MANY_CLIENTS",
    "DRAINING",
    "HTTP",
    "TIMEOUT",
    "SLOW_READER",
    "MODEL",
    "INTERNAL",
]
Closes = Literal["never", "sometimes", "always"]


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """When a code is sent, and whether the server closes the connection after it."""

    when: str
    closes: Closes = "never"


CODES: Final[Mapping[ErrorCode, CodeInfo]] = MappingProxyType(
    {
        "BAD_REQUEST": CodeInfo(
            "The command cannot be understood. Closes where the next command could not be found with "
            "certainty: a malformed or repeated `bytes=`, a line over the limit that declares one, "
            "a payload that no LF follows.",
            "sometimes",
        ),
        "UNKNOWN_VERB": CodeInfo("The first word is no verb of this protocol."),
        "BAD_OPTION": CodeInfo("An option is unknown, given twice, outside its range or not for this verb."),
        "BAD_UTF8": CodeInfo("The line, its payload or a JSON string in it is not valid UTF-8 text."),
        "DUPLICATE_ID": CodeInfo("A request with this id is running in this session."),
        "NOT_FOUND": CodeInfo("The id names nothing."),
        "LINE_TOO_LONG": CodeInfo("The line is over the limit; all of it was skipped, to its LF."),
        "PAYLOAD_TOO_LARGE": CodeInfo(
            "`bytes=` is over the limit; the payload was skipped. Closes beyond 64 MiB.", "sometimes"
        ),
        "CONTEXT_EXCEEDED": CodeInfo(
            "The prompt does not fit; `prompt_tokens=` and `capacity=` say by how much."
        ),
        "BUSY": CodeInfo("The queue is full; try again after `retry_ms=`."),
        "AUTH": CodeInfo("A token is required and missing or wrong. Closes after three.", "sometimes"),
        "FORBIDDEN": CodeInfo(
            "Not for this client: another owner's session; other sessions' figures, which are for the token "
            "of `admin` or, where no tokens are set, for clients on the same machine."
        ),
        "TOO_MANY_CLIENTS": CodeInfo("The server holds as many connections as it may.", "always"),
        "DRAINING": CodeInfo("The server is going down and takes no new work."),
        "HTTP": CodeInfo(
            "The first line is an HTTP request or a TLS hello; nothing else of it is read.", "always"
        ),
        "TIMEOUT": CodeInfo("Half a line or half a payload stood still too long.", "always"),
        "SLOW_READER": CodeInfo("Output waited too long for the client to read it.", "always"),
        "MODEL": CodeInfo("The model's files or its arithmetic failed this request."),
        "INTERNAL": CodeInfo("A fault of the server failed this request."),
    }
)


class ProtocolError(ColiError):
    """One `ERR` line as a value: both an event of the framer and an exception of the parser.

    `id` names the request when the refused line named a valid one; `details` are the `key=value` words
    that stand before the message; `close` tells the connection to close after the line, and is taken
    from the table where that leaves no choice. Two errors are equal when their lines would be.
    """

    # The root's code belongs to a class; this class stands for all of the table, so it is the instance's.
    code: ErrorCode  # type: ignore[misc]

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        close: bool | None = None,
        id: str | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        closes = CODES[code].closes
        if close is None:
            close = closes == "always"
        if close != (closes == "always") and closes != "sometimes":
            raise ValueError(f"{code} {closes} closes the connection, not close={close}")
        self.code = code
        self.message = message
        self.close = close
        self.id = id
        self.details: Mapping[str, int] = MappingProxyType(dict(details or {}))

    def _key(self) -> tuple[object, ...]:
        return self.code, self.message, self.close, self.id, tuple(self.details.items())

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ProtocolError) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"ProtocolError({self.code}, {self.message!r}, close={self.close}, id={self.id!r})"
