"""Fit a linear router that keeps the experts of most energy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

RIDGE = 1e-2
TEMPERATURE = 0.3
"""Width of the soft border between chosen and not, in standard deviations of the starting scores."""


@dataclass(frozen=True)
class Router:
    """Scores [tokens, experts] = u @ weight.T + bias; the best are chosen."""

    weight: Float32
    """[experts, hidden]"""
    bias: Float32
    """[experts]"""

    def scores(self, u: Float32) -> Float32:
        return u @ self.weight.T + self.bias


def regress(u: Float32, energy: Float32) -> Router:
    """The ridge regression of each expert's output norm, scaled to scores of unit deviation."""
    target = np.sqrt(energy)
    u_mean, target_mean = u.mean(axis=0), target.mean(axis=0)
    centred = u - u_mean
    gram = centred.T @ centred / np.float32(len(u))
    gram += RIDGE * np.mean(np.diag(gram)) * np.eye(len(gram), dtype=np.float32)
    weight = np.linalg.solve(gram, centred.T @ (target - target_mean) / np.float32(len(u))).T
    bias = target_mean - weight @ u_mean
    deviation = (u @ weight.T + bias).std()
    return Router(np.ascontiguousarray(weight / deviation), bias / deviation)


def soft_top(scores: Float32, k: int, temperature: float) -> Float32:
    """How far each expert is chosen, in (0, 1): a sigmoid around the border between rank k and k + 1."""
    ordered = np.partition(scores, [-k - 1, -k], axis=1)
    border = (ordered[:, -k - 1] + ordered[:, -k]) / 2
    return np.asarray(np.tanh((scores - border[:, None]) / (2 * temperature)) / 2 + 0.5, dtype=np.float32)


def lost_energy_gradient(scores: Float32, energy: Float32, k: int, temperature: float) -> Float32:
    """Gradient by the scores of sum((1 - chosen) * energy), [tokens, experts].

    The border moves so that the number of chosen experts stays k: raising one score lowers the others'
    chances. Hence the second term.
    """
    chosen = soft_top(scores, k, temperature)
    slope = chosen * (1 - chosen) / temperature
    mean = (slope * energy).sum(axis=1, keepdims=True) / (slope.sum(axis=1, keepdims=True) + 1e-12)
    return np.asarray(slope * (mean - energy), dtype=np.float32)


def fit(
    u: Float32,
    energy: Float32,
    start: Router,
    ks: tuple[int, ...],
    steps: int,
    rate: float = 0.02,
    batch: int = 1024,
    seed: int = 0,
) -> Router:
    """Descend on the energy of the experts that are not chosen, with Adam and a falling rate.

    energy: [tokens, experts]. The steps take the numbers of chosen experts in `ks` in turn, so that the
    ranking is good for other numbers than the model's own too.
    """
    random = np.random.default_rng(seed)
    scale = np.sqrt(np.mean(np.square(u), axis=0)) + 1e-12
    energy = energy / energy.mean()
    # One matrix of parameters: weights on inputs of unit deviation, then the bias.
    parameters = np.concatenate([start.weight * scale, start.bias[:, None]], axis=1)
    inputs = np.concatenate([u / scale, np.ones((len(u), 1), np.float32)], axis=1)
    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    for step in range(steps):
        rows = random.integers(len(u), size=batch)
        inputs = np.concatenate([u[rows] / scale, np.ones((batch, 1), np.float32)], axis=1)
        k = ks[step % len(ks)]
        gradient = (
            lost_energy_gradient(inputs @ parameters.T, energy[rows], k, TEMPERATURE).T @ inputs / batch
        )
        first += 0.1 * (gradient - first)
        second += 0.01 * (np.square(gradient) - second)
        corrected = (first / (1 - 0.9 ** (step + 1))) / (np.sqrt(second / (1 - 0.99 ** (step + 1))) + 1e-12)
        parameters -= np.float32(rate * (1 - step / steps)) * corrected
    return Router(np.ascontiguousarray(parameters[:, :-1] / scale), np.ascontiguousarray(parameters[:, -1]))
