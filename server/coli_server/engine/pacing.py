"""How many prompt tokens a step may take that also decodes: as many as its time allows.

A number of tokens bounds no time: where a layer has few experts, 32 tokens want hardly more of them than the
running sequences do, and where it has many, all of them. So this learns from how long steps took. It has no
clock of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

LIMIT = 1.8
"""A step that also reads may take so many times as long as one that decodes only. Clients see more at the
99th percentile: steps while nobody reads find more in the processor's caches, and some pieces are misjudged.
With 2.0 it was 2.5 to 2.7 times on one model, and prompts were read a tenth sooner."""

LEAST = 8
"""Prompt tokens that a step reads whatever they cost: fewer would make a long prompt take minutes."""

KEPT = 3
"""Decode-only steps whose median counts: one that waited for the disk says nothing."""

REFRESH = 32
"""Steps that read until one decodes only, to be measured: prompts may queue without a pause."""


WRONG = 0.8
"""A step that reads and takes less than this share of one that decodes only shows that what is known of those
is of slower times, from before the experts were in memory, say. It is measured again at once."""


@dataclass(slots=True)
class _Level:
    """What is known about steps beside one number of decoding sequences."""

    chunk: int
    alone: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # seconds, decode-only steps
    since: int = REFRESH  # steps that read since one was to decode only; at first that one comes first


class ChunkPacer:
    """Chooses chunks of at most `most` prompt tokens, and at least `LEAST`, from the durations of steps.

    Each number of decoding sequences has its own chunk: a step of one sequence and one of sixteen differ in
    what they cost and in what prompt tokens add. A chunk grows while steps are quick enough and shrinks when
    one was too slow; one slow step never more than halves it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = min(LEAST, most)
        self._levels: dict[int, _Level] = {}

    def chunk(self, decoding: int) -> int:
        """Prompt tokens of the next step, beside `decoding` sequences.

        0 where that step should decode only, because too little is known of such steps: never twice in
        a row, so that a prompt goes on even if those steps fail.
        """
        level = self._level(decoding)
        if level.since >= REFRESH:
            level.since = 0
            return 0
        level.since += 1
        return level.chunk

    def observe(self, decoding: int, tokens: int, seconds: float) -> None:
        """A step of `decoding` sequences and `tokens` prompt tokens (0: it decoded only) took `seconds`."""
        level = self._level(decoding)
        if not tokens:
            level.alone.append(seconds)
            level.since = 0
            return
        if not level.alone:
            return
        alone = median(level.alone)
        if seconds < WRONG * alone:
            level.alone.clear()
            level.since = REFRESH
            return
        self._adapt(level, tokens, (seconds - alone) / ((LIMIT - 1) * alone) if alone > 0 else 0.0)

    def _adapt(self, level: _Level, tokens: int, share: float) -> None:
        """`share`: of the time that `tokens` prompt tokens may add to a step, how much they did add."""
        pace = max(1, level.chunk // 8)
        if share > 1 and tokens > level.chunk:  # a short prompt, read at once: nothing is known of less
            return
        if share > 1.5:
            level.chunk = int(level.chunk * max(0.5, 1 / share))
        elif share > 1:
            level.chunk -= pace
        elif tokens >= level.chunk:  # a shorter piece, a prompt's last, says nothing about a longer one
            level.chunk += pace if share < 0.75 else 1
        level.chunk = min(max(level.chunk, self._least), self._most)

    def _level(self, decoding: int) -> _Level:
        return self._levels.setdefault(decoding, _Level(self._least))
