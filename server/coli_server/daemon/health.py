"""Whether the daemon is fit: what balancers and supervisors ask, and the watch over the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

# Time in which this process itself did not run (stopped, swapped out) does not count against the engine.
_LONGEST_GAP = 1.0


@dataclass(slots=True)
class Health:
    """The state of the daemon. Only the event loop writes it; anybody may read.

    `live` turns false when the process is to be replaced, `ready` when it is to get no new work.
    """

    started: bool = False
    draining: bool = False
    stalled: bool = False
    failed: bool = False

    @property
    def live(self) -> bool:
        return not self.failed

    @property
    def ready(self) -> bool:
        return self.started and not (self.draining or self.stalled or self.failed)

    @property
    def reason(self) -> str:
        """Why it is not ready, in a few words; `ok` when it is."""
        if self.failed:
            return "the engine has failed"
        if self.stalled:
            return "the engine stands still"
        if self.draining:
            return "draining"
        return "ok" if self.started else "starting"


class Watchdog:
    """Notices an engine whose step does not end, by its heartbeat.

    It stands still when it has work and its heartbeat has not changed for `limit` seconds, and is beyond hope
    after `patience` seconds more; 0 means never. Its first heartbeat after that makes it well again.
    """

    def __init__(self, *, limit: float, patience: float) -> None:
        self._limit = limit
        self._patience = patience
        self._heartbeat = 0.0
        self._waited = 0.0
        self.stalled = False
        self.hopeless = False

    def look(self, elapsed: float, *, busy: bool, heartbeat: float) -> None:
        """Look again, `elapsed` seconds after the last time. `busy`: the engine has accepted work."""
        if heartbeat != self._heartbeat or not (busy or self.stalled):
            self._heartbeat = heartbeat
            self._waited = 0.0
            self.stalled = self.hopeless = False
            return
        self._waited += min(elapsed, _LONGEST_GAP)
        self.stalled = bool(self._limit) and self._waited >= self._limit
        self.hopeless = self.stalled and bool(self._patience) and self._waited >= self._limit + self._patience
