"""Histograms of seconds with fixed buckets from 1 ms to 10 minutes: streamed models are slow.

Each power of two of a millisecond is divided into four equal buckets, so a quantile is off by an eighth of
its value at most, and finding the bucket of a value takes no search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST = 0.001  # seconds; everything below is one bucket
_OCTAVES = 20  # 2**19 ms is the last power of two below 10 minutes
_STEPS = 4  # buckets of an octave

BOUNDS: tuple[float, ...] = tuple(
    _FIRST * 2**octave * (1 + step / _STEPS) for octave in range(_OCTAVES) for step in range(_STEPS)
)
"""Bounds between buckets in seconds, ascending. Bucket i holds `BOUNDS[i - 1] <= value < BOUNDS[i]`."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """What a histogram had seen at one moment. `counts` has one entry more than `BOUNDS`."""

    counts: tuple[int, ...]
    sum: float
    maximum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def __sub__(self, earlier: HistogramSnapshot) -> HistogramSnapshot:
        """What was seen after `earlier`; the maximum stays that of the whole time."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return HistogramSnapshot(counts, self.sum - earlier.sum, self.maximum)

    def quantile(self, q: float) -> float:
        """The value in seconds below which the share `q` of all values lies, estimated; 0 when empty."""
        rank = q * self.count
        below = 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = BOUNDS[bucket - 1] if bucket else 0.0
                high = BOUNDS[bucket] if bucket < len(BOUNDS) else self.maximum
                return min(low + (high - low) * (rank - below) / count, self.maximum)
            below += count
        return 0.0


NOTHING_SEEN = HistogramSnapshot((0,) * (len(BOUNDS) + 1), 0.0, 0.0)


class Histogram:
    """Counts of durations. One thread observes; a snapshot is a value that anybody may keep."""

    __slots__ = ("_counts", "_maximum", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0
        self._maximum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration. A negative one (a clock's fault) counts as zero."""
        seconds = max(seconds, 0.0)
        self._counts[_bucket(seconds)] += 1
        self._sum += seconds
        self._maximum = max(self._maximum, seconds)

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(tuple(self._counts), self._sum, self._maximum)


def _bucket(seconds: float) -> int:
    mantissa, exponent = math.frexp(seconds / _FIRST)  # mantissa in [0.5, 1)
    if exponent < 1:
        return 0
    if exponent > _OCTAVES:
        return len(BOUNDS)
    return 1 + (exponent - 1) * _STEPS + int((mantissa - 0.5) * 2 * _STEPS)
