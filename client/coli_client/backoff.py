"""When to try again: after losses and refusals that pass, for commands that may be sent twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from coli_client.errors import Busy, ColiError, ConnectionLost, Timeout, TryLater
from coli_client.sync import Client

__all__ = ["Backoff", "retry"]

T = TypeVar("T")

PASSING = (ConnectionLost, Timeout, TryLater)
"""What another attempt may cure."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often to try, and how long to wait between: `first` seconds, then each time `factor` longer.

    No wait is longer than `most`. Each is shortened by a random part of up to `jitter`, so that many clients
    of a restarted server do not come at the same time. A server's own `retry_ms` is kept to.
    """

    attempts: int = 6
    first: float = 0.1
    factor: float = 2.0
    most: float = 5.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if (
            self.attempts < 1
            or self.first < 0
            or self.factor < 1
            or self.most < 0
            or not 0 <= self.jitter <= 1
        ):
            raise ValueError(f"{self} is out of range")

    def waits(self) -> Iterator[float]:
        """The seconds between the attempts: one wait fewer than there are attempts."""
        wait = self.first
        for _ in range(self.attempts - 1):
            yield min(wait, self.most) * (1 - random.random() * self.jitter)
            wait *= self.factor


DEFAULT = Backoff()


def at_least(wait: float, error: ColiError) -> float:
    """The wait after `error`: what the server asked for, if that is longer."""
    asked = error.retry_ms if isinstance(error, Busy) else None
    return max(wait, (asked or 0) / 1000)


def retry(client: Client, call: Callable[[Client], T], backoff: Backoff = DEFAULT) -> T:
    """`call(client)`, and again after a loss or a refusal that passes; connects anew where needed.

    For commands that may be sent twice: `ping`, `version`, `help`, `stat`, `score`. A new connection is not
    attached to the session that the old one had. Raises the last error when no attempt is left.
    """
    for wait in backoff.waits():
        try:
            client.connect()
            return call(client)
        except PASSING as error:
            time.sleep(at_least(wait, error))
    client.connect()
    return call(client)
