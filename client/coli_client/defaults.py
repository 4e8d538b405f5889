"""What both clients take for granted."""

from __future__ import annotations

import itertools
import secrets

HOST = "127.0.0.1"
PORT = 7311
TIMEOUT = 60.0
"""Seconds of silence while an answer is due. A server sends news of a waiting request every 2 s."""
CONNECT_TIMEOUT = 5.0


class IdSource:
    """Request ids. The random part keeps clients apart that share a session."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"
