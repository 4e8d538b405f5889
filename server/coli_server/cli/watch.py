"""Watching a daemon: its figures again and again, in a thread, over restarts of the daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coli_client import AccessDenied, Client, ColiError

Figures = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """What the daemon told at one moment. `sessions` are by name, None when they are not for this client."""

    moment: float
    figures: Figures
    sessions: Mapping[str, Figures] | None = field(default_factory=dict)

    def number(self, name: str) -> float:
        """A figure as a number; 0 where there is none."""
        return number(self.figures, name)


@dataclass(frozen=True, slots=True)
class Lost:
    """The daemon did not answer, and why."""

    reason: str


News = Sample | Lost


def number(figures: Figures, name: str) -> float:
    """A figure as a number; 0 where there is none, or none with a value."""
    word = figures.get(name, "-")
    return 0.0 if word == "-" else float(word)


class Watcher:
    """Calls `tell` with a sample each `interval` seconds, and with the reason when there is none.

    It happens on a thread of its own: a daemon that does not answer must not stop the keyboard.
    """

    def __init__(self, connect: Callable[[], Client], interval: float, tell: Callable[[News], None]) -> None:
        self._connect = connect
        self._interval = interval
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coli-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends soon; an answer that is still waited for is not told any more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._connect() as client:
                    self._follow(client)
            except ColiError as error:
                if not self._over.is_set():
                    self._tell(Lost(str(error)))
                    self._over.wait(self._interval)

    def _follow(self, client: Client) -> None:
        while not self._over.is_set():
            sample = take(client)
            if not self._over.is_set():
                self._tell(sample)
                self._over.wait(self._interval)


def take(client: Client) -> Sample:
    """The daemon's figures now, and those of its sessions if it tells them."""
    figures = client.stat()
    try:
        sessions = _by_session(client.stat("sessions"))
    except AccessDenied:
        sessions = None
    return Sample(time.monotonic(), figures, sessions)


def _by_session(figures: Figures) -> dict[str, dict[str, str]]:
    sessions: dict[str, dict[str, str]] = {}
    for name, value in figures.items():
        session, _, figure = name.rpartition(":")
        sessions.setdefault(session, {})[figure] = value
    return sessions
