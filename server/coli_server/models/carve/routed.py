"""One layer of a recipe as the engine runs it, with experts chosen in any way, in float32 NumPy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.models.carve.cluster import top_mask
from coli_server.models.carve.forward import Float32, Layer, load_layer
from coli_server.models.dense import DenseModel, bfloat16_values
from coli_server.models.recipe import Recipe


@dataclass(frozen=True)
class RoutedLayer:
    """A carved layer with its router; the output scales are in `layer.down`, as in a checkpoint."""

    layer: Layer
    order: NDArray[np.uint16]
    """Neuron ids: shared expert first, then expert by expert, [neurons]."""
    shared: int
    router: Float32
    """[experts, hidden]"""
    bias: Float32
    """[experts]"""

    @property
    def experts(self) -> int:
        return len(self.router)

    def scores(self, u: Float32) -> Float32:
        """Sigmoid scores less 1/2, so that small ones stay exact; without the bias; [tokens, experts]."""
        return np.asarray(np.tanh(u @ self.router.T / 2) / 2, dtype=np.float32)

    def weights(self, u: Float32) -> Float32:
        """What each expert weighs if it is chosen, twice the sigmoid, [tokens, experts]."""
        return 1 + 2 * self.scores(u)

    def expert_neurons(self, expert: int) -> NDArray[np.uint16]:
        return np.split(self.order[self.shared :], self.experts)[expert]

    def output(self, u: Float32, activation: Float32, k: int, ranking: Float32) -> Float32:
        """What the layer adds to the residual stream with the k experts that `ranking` puts first.

        u: the layer's input, [tokens, hidden]; activation: its `swiglu`, [tokens, neurons]; ranking:
        [tokens, experts].
        """
        weights = self.weights(u) * top_mask(ranking, k)
        width = (len(self.order) - self.shared) // self.experts
        gate = np.ones_like(activation)
        gate[:, self.order[self.shared :]] = np.repeat(weights, width, axis=1)
        return np.asarray((activation * gate) @ self.layer.down.T)


def routed_layer(dense: DenseModel, recipe: Recipe, number: int) -> RoutedLayer:
    """Layer `number` of a recipe, rounded as the checkpoint holds it."""
    return RoutedLayer(
        layer=load_layer(dense, number, recipe.neuron_scale(number)),
        order=recipe.order[number],
        shared=recipe.shared,
        router=bfloat16_values(recipe.router[number]),
        bias=recipe.router_bias[number],
    )


Ranking = Callable[[RoutedLayer, Float32, Float32], Float32]
"""(routed, u, activation) -> what experts are ranked by, [tokens, experts]."""


def by_router(routed: RoutedLayer, u: Float32, _activation: Float32) -> Float32:
    return routed.scores(u) + routed.bias


def by_output_norm(routed: RoutedLayer, _u: Float32, activation: Float32) -> Float32:
    """By the norm of each expert's output, before the router weighs it.

    The weighed norm makes a worse choice: the router's weight is its guess, and the output says more.
    """
    norms = [
        np.linalg.norm(activation[:, neurons] @ routed.layer.down[:, neurons].T, axis=1)
        for neurons in map(routed.expert_neurons, range(routed.experts))
    ]
    return np.stack(norms, axis=1)


def at_random(seed: int) -> Ranking:
    dice = np.random.default_rng(seed)

    def ranking(routed: RoutedLayer, u: Float32, _activation: Float32) -> Float32:
        return dice.random((len(u), routed.experts), dtype=np.float32)

    return ranking
