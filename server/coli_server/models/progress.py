"""Progress on stderr: bars on a terminal, one quiet line a step elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Progress:
    """Where progress is shown; `bars=None` shows bars when stderr is a terminal."""

    bars: bool

    @classmethod
    def to_stderr(cls) -> "Progress":
        return cls(bars=sys.stderr.isatty())

    def say(self, text: str) -> None:
        print(f"coli: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, step: str, total: int, unit: str = "B") -> Iterator[Advance]:
        """A bar over `total` units, gone when done; the function given advances it."""
        with tqdm(
            desc=f"coli: {step}",
            total=total,
            unit=unit,
            unit_scale=unit == "B",
            disable=not self.bars,
            leave=False,
            file=sys.stderr,
        ) as bar:
            yield bar.update
