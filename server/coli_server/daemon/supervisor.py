"""systemd's side of a service, in plain Python: its notifications and the sockets that it hands over."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

_FIRST_FD = 3
# In the time after which the supervisor would give up: some of them may be late.
_BEATS = 4


class Notifier:
    """Tells the supervisor on `NOTIFY_SOCKET` how the service is. Without one everything is a no-op."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes its variables out of `environ`: child processes must not speak for the service."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # a name in Linux's abstract namespace
            self._address = "\0" + self._address[1:]
        seconds = environ.pop("WATCHDOG_USEC", "")
        ours = environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_seconds = int(seconds) / 1e6 if seconds.isdecimal() and ours else 0.0
        self._told = float("-inf")

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def alive(self, now: float) -> None:
        """All is well at `now` (seconds). Said as often as the supervisor's watchdog needs it, if any."""
        if self._watchdog_seconds and now - self._told >= self._watchdog_seconds / _BEATS:
            self._told = now
            self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.setblocking(False)
            try:
                one.sendto("\n".join(lines).encode(), self._address)
            except OSError as error:
                log.warning("the supervisor was not told %s: %s", lines[0], error.strerror)


def inherited_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The listening sockets that the supervisor opened for this process (LISTEN_FDS); often none."""
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
    for one in sockets:
        one.set_inheritable(False)
        one.setblocking(False)
    return sockets
