"""How distillation goes, without torch: settings, learning rates, and which windows of text a step reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Windows = Sequence[Sequence[int]]
"""Token ids, every window of the same length."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run. An interrupted run goes on under the same plan only."""

    steps: int = 500
    batch: int = 4
    """Windows in a step."""
    window: int = 256
    """Tokens in a window."""
    router_rate: float = 0.02
    """Peak learning rate of router weights, relative to their root mean square at the start."""
    bias_rate: float = 0.003
    scale_rate: float = 0.004
    """Of the logarithms of output scales."""
    temperature: float = 0.05
    """Width of the soft border between chosen experts and others, on sigmoid scores."""
    spread: float = 0.15
    """Standard deviation of router logits at the start."""
    seed: int = 5


WARM_UP = 20
"""Steps in which the learning rate rises; it falls along a cosine over the whole run."""

LAST_RATE = 0.03
"""What is left of the learning rate at the end."""


def rate_factor(step: int, steps: int) -> float:
    """What learning rates are multiplied with in step `step` of `steps`, counted from 0."""
    falling = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * falling)


@dataclass(frozen=True)
class Source:
    """Windows of one kind of text and the share of the steps' windows that come from it."""

    windows: Windows
    share: float


def cut(ids: Sequence[int], window: int) -> list[list[int]]:
    """Whole windows of one text; what is left at its end is not used."""
    return [list(ids[start : start + window]) for start in range(0, len(ids) - window + 1, window)]


def packed(dialogues: Sequence[Sequence[int]], window: int, seed: int) -> list[list[int]]:
    """Dialogues in random order, one behind the other, cut into windows."""
    order = np.random.default_rng(seed).permutation(len(dialogues))
    return cut([token for place in order for token in dialogues[place]], window)


def drawn(sources: Sequence[Source], plan: Plan, step: int) -> NDArray[np.int64]:
    """Token ids of step `step`, [batch, window]: a function of seed and step, whatever ran before."""
    random = np.random.default_rng((plan.seed, step))
    shares = np.array([source.share for source in sources])
    kinds = random.choice(len(sources), size=plan.batch, p=shares / shares.sum())
    rows = [sources[kind].windows[random.integers(len(sources[kind].windows))] for kind in kinds]
    return np.array(rows, dtype=np.int64)
