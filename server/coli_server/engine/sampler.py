"""Choosing the next token from a row of logits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.api import SamplingOptions
from coli_server.errors import ModelError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class Sampler:
    """Draws the tokens of one request. The same options, seed and logits give the same tokens.

    Order of the filters: repeat penalty (CTRL, arXiv:1909.05858) on tokens seen so far, temperature,
    top-k, top-p (nucleus, arXiv:1904.09751), min-p (arXiv:2407.01082); then one draw.
    """

    def __init__(self, options: SamplingOptions, prompt: Iterable[int]) -> None:
        self._options = options
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self._seen = set(prompt) if options.repeat_penalty != 1.0 else set()

    def choose(self, logits: F32) -> int:
        """The next token id for `logits`, float32 [vocab]. Raises ModelError on NaN or +inf."""
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise ModelError(f"the logits hold {logits[best]} at token {best}: the model's arithmetic failed")
        options = self._options
        if options.repeat_penalty != 1.0:
            logits = self._penalised(logits)
            best = int(np.argmax(logits))
        token = best if options.temperature == 0.0 else self._draw(logits.astype(np.float64))
        if options.repeat_penalty != 1.0:
            self._seen.add(token)
        return token

    def _penalised(self, logits: F32) -> F32:
        logits = logits.copy()
        seen = np.fromiter(self._seen, np.int64, len(self._seen))
        penalty = np.float32(self._options.repeat_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        return logits

    def _draw(self, logits: F64) -> int:
        options = self._options
        # Ties go to the lower id, so that the order, and with it the draw, is a function of the logits.
        order = np.argsort(-logits, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        scaled = (logits[order] - logits[order[0]]) / options.temperature
        mass = np.exp(scaled)
        mass /= mass.sum()
        keep = len(mass)
        if options.top_p < 1.0:
            keep = min(keep, int(np.searchsorted(np.cumsum(mass), options.top_p)) + 1)
        if options.min_p > 0.0:
            keep = min(keep, max(1, int(np.count_nonzero(mass >= options.min_p * mass[0]))))
        cumulative = np.cumsum(mass[:keep])
        point = self._random.random() * cumulative[-1]
        return int(order[min(int(np.searchsorted(cumulative, point, side="right")), keep - 1)])


def log_softmax(logits: F32) -> F64:
    """Natural log-probabilities of the stock distribution, float64 [vocab]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    result: F64 = shifted - np.log(np.exp(shifted).sum())
    return result


def best_tokens(logprobs: F64, count: int) -> list[int]:
    """Ids of the `count` most likely tokens, best first, ties to the lower id."""
    count = min(count, len(logprobs))
    if count <= 0:
        return []
    floor = np.partition(logprobs, -count)[-count]
    candidates = np.flatnonzero(logprobs >= floor)
    order = np.argsort(-logprobs[candidates], kind="stable")[:count]
    return [int(token) for token in candidates[order]]
