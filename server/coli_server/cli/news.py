"""What happens before the first word comes, on a terminal: one line that is written over and wiped."""

from __future__ import annotations

import sys
from typing import TextIO

from coli_client import Info

_WORDS = {"prefill": "reading the prompt", "queue": "place in the queue", "tokens": "tokens made"}


class News:
    """Shows the server's news of a waiting request on `stream` (standard error) if that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # Looked up now: a default argument would keep the stream of the time of the import.
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = False

    def show(self, info: Info) -> None:
        """Show what the server says of a request that waits."""
        self.note(", ".join(f"{_WORDS.get(name, name)} {value}" for name, value in info.fields.items()))

    def note(self, text: str) -> None:
        """Show `text` in place of the last news."""
        if self._terminal:
            self._write(f"\r\x1b[K({text})")
            self._shown = True

    def wipe(self) -> None:
        """Give the line back to the text."""
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
