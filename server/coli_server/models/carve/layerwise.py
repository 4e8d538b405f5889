"""Carve one layer: alternate between fitting the router and moving neurons to where it finds them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.cluster import (
    Owners,
    expert_energy,
    improved_owners,
    initial_owners,
    neuron_energy,
    top_mask,
)
from coli_server.models.carve.forward import Layer
from coli_server.models.carve.router import Router, fit, regress
from coli_server.models.dense import bfloat16_bits, bfloat16_values

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Settings:
    """How a layer is carved."""

    shared: int = 1024
    experts: int = 16
    experts_per_token: int = 8
    rounds: int = 5
    """Of moving neurons after fitting the router."""
    steps: int = 150
    """Of router descent in a round; the last fit takes three times as many."""
    caution: float = 0.03
    """See `improved_owners`."""
    border: tuple[int, ...] = (8, 4, 8, 12, 8)
    """Numbers of chosen experts that the router is fitted for, in turn."""
    logit_range: float = 2**-13
    """Largest router logit: so small that a chosen expert weighs 1 within 0.01 %."""


@dataclass(frozen=True)
class CarvedLayer:
    """Where one layer's neurons went, and its router, scaled as the checkpoint holds it."""

    owners: Owners
    router: Router
    """Weights are exact bfloat16 values; the bias belongs to the sigmoid scores."""

    def scores(self, u: Float32) -> Float32:
        """Sigmoid scores with the bias, less the constant 1/2, [tokens, experts]."""
        return np.asarray(np.tanh(u @ self.router.weight.T / 2) / 2 + self.router.bias, dtype=np.float32)

    def active(self, kept: Float32) -> Float32:
        """1 for each neuron that is shared or in an expert of `kept` [tokens, experts], [tokens, neurons]."""
        return np.concatenate([np.ones((len(kept), 1), np.float32), kept], axis=1)[:, self.owners]

    def output(self, u: Float32, activation: Float32, layer: Layer, k: int) -> Float32:
        """The carved layer's output with k experts a token, [tokens, hidden].

        activation: `swiglu` of the layer's inputs u, [tokens, neurons].
        """
        return np.asarray((activation * self.active(top_mask(self.scores(u), k))) @ layer.down.T)


@dataclass(frozen=True)
class Loss:
    """Parts of a layer's output energy that are lost with K experts, on tokens not used for the fit."""

    router: float
    oracle: float
    """If the experts of most energy were chosen."""
    random: float


def carve_layer(
    u: Float32, activation: Float32, weight: Float32, layer: Layer, settings: Settings
) -> tuple[CarvedLayer, Loss]:
    """Carve one layer from its inputs u [tokens, hidden], token t counting `weight[t]`.

    activation: `swiglu` of u, [tokens, neurons]. The last tenth of the tokens is kept for the figures.
    """
    energy = neuron_energy(activation, layer.down)
    energy *= (weight / weight.mean())[:, None]
    held = len(u) // 10
    owners, router = _alternate(u[:-held], energy[:-held], settings)
    carved = CarvedLayer(owners, _scaled(router, u, settings.logit_range))
    loss = _loss(carved, u[-held:], energy[-held:], settings)
    return carved, loss


def _alternate(u: Float32, energy: Float32, settings: Settings) -> tuple[Owners, Router]:
    experts, k, shared = settings.experts, settings.experts_per_token, settings.shared
    owners = initial_owners(energy[::8], shared, experts)
    owners = improved_owners(
        energy, top_mask(expert_energy(energy, owners, experts), k), shared, settings.caution
    )
    router = regress(u, expert_energy(energy, owners, experts))
    for turn in range(settings.rounds):
        by_expert = expert_energy(energy, owners, experts)
        router = fit(u, by_expert, router, settings.border, settings.steps, seed=turn)
        owners = improved_owners(energy, top_mask(router.scores(u), k), shared, settings.caution)
    by_expert = expert_energy(energy, owners, experts)
    return owners, fit(u, by_expert, router, settings.border, 3 * settings.steps, seed=settings.rounds)


def _scaled(router: Router, u: Float32, logit_range: float) -> Router:
    scale = np.float32(logit_range / np.abs(u @ router.weight.T).max())
    # Near 0 the sigmoid is 1/2 + z/4, so a bias on z is a quarter of it on the sigmoid.
    bias = (router.bias - router.bias.mean()) * scale / 4
    return Router(bfloat16_values(bfloat16_bits(router.weight * scale)), bias)


def _loss(carved: CarvedLayer, u: Float32, energy: Float32, settings: Settings) -> Loss:
    k, total = settings.experts_per_token, energy.sum()
    by_expert = expert_energy(energy, carved.owners, settings.experts)
    dice = np.random.default_rng(0).random(by_expert.shape, dtype=np.float32)

    def lost(scores: Float32) -> float:
        return float(((1 - top_mask(scores, k)) * by_expert).sum() / total)

    return Loss(router=lost(carved.scores(u)), oracle=lost(by_expert), random=lost(dice))
