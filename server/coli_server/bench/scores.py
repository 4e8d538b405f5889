"""What the logits of one token say: how likely the text is, and how far they are from the stock ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.errors import ModelError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StockRows:
    """The stock next-token distributions of some positions, ready to be compared with.

    logits     float64 [rows, vocab]
    mass       float64 [rows, vocab]: their softmax
    log_total  float64 [rows]: ln of the sum of exp(logits)
    mean       float64 [rows]: sum of mass * logits
    best       int64 [rows]: the likeliest token, ties to the lower id
    """

    logits: F64
    mass: F64
    log_total: F64
    mean: F64
    best: NDArray[np.int64]

    @classmethod
    def of(cls, logits: F32) -> StockRows:
        """From float32 [rows, vocab]. Raises ModelError where they are not finite."""
        wide = logits.astype(np.float64)
        log_total = log_sum_exp(wide)
        mass = np.exp(wide - log_total[:, None])
        return cls(wide, mass, log_total, np.einsum("rv,rv->r", mass, wide), np.argmax(logits, axis=1))

    def __getitem__(self, rows: slice) -> StockRows:
        return StockRows(
            self.logits[rows], self.mass[rows], self.log_total[rows], self.mean[rows], self.best[rows]
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of consecutive predictions, each an array [tokens].

    nll        float64, nats: -ln of the probability of the token that really follows
    stock_nll  float64, nats: the same under stock routing
    kl         float64, nats: divergence of the next-token distribution from the stock one; exactly 0
               where the logits are the same bits
    same       bool: whether the likeliest token is the stock one
    """

    nll: F64
    stock_nll: F64
    kl: F64
    same: NDArray[np.bool_]

    @classmethod
    def join(cls, parts: list[TokenScores]) -> TokenScores:
        """Consecutive pieces as one."""
        return cls(
            np.concatenate([part.nll for part in parts]),
            np.concatenate([part.stock_nll for part in parts]),
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.same for part in parts]),
        )


def compare(stock: StockRows, logits: F32, targets: NDArray[np.int64]) -> TokenScores:
    """Score `logits`, float32 [rows, vocab], where `targets`, int64 [rows], follow."""
    wide = logits.astype(np.float64)
    log_total = log_sum_exp(wide)
    rows = np.arange(len(targets))
    # KL(p || q) = sum p (ln p - ln q), with ln q = logits - log_total; the same operations on the same
    # bits give the same numbers, so the difference is exactly 0 where nothing changed.
    kl = (stock.mean - stock.log_total) - (np.einsum("rv,rv->r", stock.mass, wide) - log_total)
    return TokenScores(
        log_total - wide[rows, targets],
        stock.log_total - stock.logits[rows, targets],
        np.maximum(kl, 0.0),
        np.argmax(logits, axis=1) == stock.best,
    )


def log_sum_exp(logits: F64) -> F64:
    """ln of the sum of exp over the last axis, float64 [rows]. Raises ModelError where it is not finite."""
    top = logits.max(axis=1)
    with np.errstate(invalid="ignore"):  # said below
        total: F64 = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    if not np.isfinite(total).all():
        raise ModelError("the logits are not finite: the model's arithmetic failed")
    return total
