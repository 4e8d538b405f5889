"""Every error of this package, grouped by what the caller can do about it.

Wrong arguments are plain `TypeError` and `ValueError`, raised before a byte is sent. All else is a
`ColiError`.
"""

# ruff: noqa: N818 - the classes say what happened (Busy, NotFound); that all are errors is said by the root.

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AccessDenied",
    "BadOption",
    "BadRequest",
    "Busy",
    "ClientInUse",
    "ColiError",
    "ConnectionLost",
    "ContextExceeded",
    "Draining",
    "DuplicateId",
    "NotFound",
    "PayloadTooLarge",
    "ProtocolViolation",
    "RequestEnded",
    "RequestFailed",
    "ServerClosed",
    "ServerError",
    "Timeout",
    "TooManyClients",
    "TryLater",
    "server_error",
]


class ColiError(Exception):
    """The root of everything that this package raises on purpose."""


class ConnectionLost(ColiError, ConnectionError):
    """There is no connection, or it ended before the reply did. `connect()` makes a new one."""


class Timeout(ColiError, TimeoutError):
    """The server said nothing for too long. The connection is closed; `connect()` makes a new one."""


class ProtocolViolation(ColiError):
    """The other end sent something that is not this protocol. The connection is closed."""


class ClientInUse(ColiError):
    """A `Client` does one thing at a time: finish or cancel its generation, or use another `Client`."""


class RequestEnded(ColiError):
    """The request was ended (cancelled, out of time, server going down) before it had a result."""


class ServerError(ColiError):
    """The server answered `ERR`. `code` is the protocol's word; unknown codes come as this class itself."""

    def __init__(
        self, code: str, message: str, id: str | None = None, fields: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(code, message, id, fields)
        self.code = code
        self.message = message
        self.id = id
        self.fields: Mapping[str, str] = dict(fields or {})

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code

    def _number(self, name: str) -> int | None:
        value = self.fields.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


class TryLater(ServerError):
    """Nothing is wrong with the request: send it again later, or to another server."""


class Busy(TryLater):
    """The queue is full."""

    @property
    def retry_ms(self) -> int | None:
        """After how many milliseconds the server suggests to try again."""
        return self._number("retry_ms")


class Draining(TryLater):
    """The server is going down and takes no new work."""


class TooManyClients(TryLater):
    """The server's connection limit is reached; it closed this connection."""


class BadRequest(ServerError):
    """The command cannot be done as it is: change it before sending it again."""


class BadOption(BadRequest):
    """An option is unknown to this server, or its value is out of range."""


class DuplicateId(BadRequest):
    """Another running request of this session has the same id."""


class NotFound(BadRequest):
    """The command names something that does not exist (any more)."""


class PayloadTooLarge(BadRequest):
    """The text is larger than the server takes."""


class ContextExceeded(BadRequest):
    """The prompt does not fit the model's context. Nothing was truncated."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has."""
        return self._number("prompt_tokens")

    @property
    def capacity(self) -> int | None:
        """How many tokens a prompt may have."""
        return self._number("capacity")


class AccessDenied(ServerError):
    """A token is missing or wrong, or the session belongs to someone else."""


class ServerClosed(ServerError):
    """The server closed the connection on purpose (this side was too slow, or was taken for HTTP)."""


class RequestFailed(ServerError):
    """The model or a fault in the server failed this request alone."""


_CLASSES: Mapping[str, type[ServerError]] = {
    "BUSY": Busy,
    "DRAINING": Draining,
    "TOO_MANY_CLIENTS": TooManyClients,
    "BAD_REQUEST": BadRequest,
    "UNKNOWN_VERB": BadRequest,
    "BAD_UTF8": BadRequest,
    "LINE_TOO_LONG": BadRequest,
    "BAD_OPTION": BadOption,
    "DUPLICATE_ID": DuplicateId,
    "NOT_FOUND": NotFound,
    "PAYLOAD_TOO_LARGE": PayloadTooLarge,
    "CONTEXT_EXCEEDED": ContextExceeded,
    "AUTH": AccessDenied,
    "FORBIDDEN": AccessDenied,
    "TIMEOUT": ServerClosed,
    "SLOW_READER": ServerClosed,
    "HTTP": ServerClosed,
    "MODEL": RequestFailed,
    "INTERNAL": RequestFailed,
}


def server_error(
    code: str, message: str, id: str | None = None, fields: Mapping[str, str] | None = None
) -> ServerError:
    """The error object for a wire code; a code that is not in the table gives the base class."""
    return _CLASSES.get(code, ServerError)(code, message, id, fields)
