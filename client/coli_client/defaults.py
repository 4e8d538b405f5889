"""What both clients take for granted."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

HOST = "127.0.0.1"
PORT = 7311
TIMEOUT = 60.0
"""Seconds of silence while an answer is due. A server sends news of a waiting request every 2 s."""
CONNECT_TIMEOUT = 5.0
AT_ONCE = 8
"""Requests that run together on one connection; a server's default limit."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: TCP `host` and `port`, or `unix:PATH` as the host (the port is not used)."""

    host: str
    port: int

    @property
    def path(self) -> str | None:
        """The path of the Unix socket; `None` for TCP."""
        return self.host.removeprefix("unix:") if self.host.startswith("unix:") else None

    def __str__(self) -> str:
        return self.host if self.path is not None else f"{self.host}:{self.port}"


class IdSource:
    """Request ids. The random part keeps clients apart that share a session."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"
