"""Holding text back until it is certain that no stop string begins in it."""

from __future__ import annotations


class StopFilter:
    """Passes text through up to the first stop string; nothing of it or after it ever gets out.

    A stop string may span any number of pieces: the longest tail that could still become one is held
    back until more text decides.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text; returns what may be sent now. Sets `stopped` when a stop string is complete."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        buffer = self._held + text
        found = [at for at in (buffer.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text still held when the generation ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
