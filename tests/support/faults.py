"""A reader that stops short, fails or waits on command."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coli_server.experts import PreadReader


@dataclass
class FaultReader:
    """The real reader, which stops short, fails or waits where a test says so, and keeps a log.

    `fail` maps a place (file name, absolute offset) to the error of every read that covers it. `longest`
    bounds a read in bytes. Reads wait while `gate` is not set.
    """

    inner: PreadReader = field(default_factory=PreadReader)
    fail: dict[tuple[str, int], Exception] = field(default_factory=dict)
    longest: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    def preadv(self, file: Path, buffers: Sequence[memoryview], offset: int) -> int:
        self.gate.wait()
        size = sum(len(view) for view in buffers)
        self.log.append((file.name, offset, size))
        for (name, place), error in list(self.fail.items()):
            if name == file.name and offset <= place < offset + size:
                raise error
        if self.longest is not None:
            buffers = [buffers[0][: self.longest]]
        return self.inner.preadv(file, buffers, offset)

    def close(self) -> None:
        self.closed = True
        self.inner.close()
