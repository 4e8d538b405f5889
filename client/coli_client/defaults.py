"""What both clients take for granted."""

from __future__ import annotations

import itertools
import secrets
import ssl
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


def tls_context(tls: bool | ssl.SSLContext, cafile: str | None) -> ssl.SSLContext | None:
    """What to encrypt with, `None` for a plain connection. `cafile` (PEM): whom to trust; it means TLS."""
    if isinstance(tls, ssl.SSLContext):
        if cafile is not None:
            raise ValueError("cafile goes with tls=True; an SSLContext has its own")
        return tls
    return ssl.create_default_context(cafile=cafile) if tls or cafile is not None else None


class IdSource:
    """Request ids. The random part keeps clients apart that share a session."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"
