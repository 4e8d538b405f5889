"""What a person sees of a long start: a bar on a terminal, a few lines anywhere else."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30
_STEPS = 4  # lines where there is no terminal


class Progress:
    """Shows that `done` of `total` things are ready. Calls in any order of magnitude are cheap."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        steps = 100 if self._bar else _STEPS
        step = done * steps // total if total else steps
        if step == self._shown:
            return
        self._shown = step
        if self._bar:
            filled = step * _WIDTH // steps
            end = "\n" if done == total else ""
            bar = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {step:3d} %"
            print(f"\r{self._title} {bar}", end=end, file=self._stream, flush=True)
        else:
            print(f"{self._title}: {done} of {total}", file=self._stream, flush=True)
