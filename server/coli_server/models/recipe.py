"""A carving recipe: which feed-forward neuron of a dense model goes where, and the routers.

A recipe is data of this project and holds no weights of the source model. It is a safetensors file:

    order        uint16  [layers, ffn]              neuron ids: shared expert first, then expert by expert
    router       uint16  [layers, experts, hidden]  bfloat16 bits of the router weights
    router_bias  float32 [layers, experts]          added to the sigmoid scores for ranking only
    scale        float16 [layers, 1 + experts, hidden]  of the outputs, by channel: shared expert first, then
                                                    each routed one

A token's chosen experts are those of largest sigmoid(z) + bias, where z are the router's products with the
layer's input. Each weighs 2 * sigmoid(z), the shared expert 1. Besides, every channel of an expert's
output has a fixed scale.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from coli_server.errors import ModelError

FORMAT = "coli-carving-3"


@dataclass(frozen=True)
class Recipe:
    """How to carve one dense model; arrays as in the module's docstring."""

    shared: int
    """Neurons of the always-on shared expert, a multiple of `expert_width`."""
    experts_per_token: int
    order: NDArray[np.uint16]
    router: NDArray[np.uint16]
    router_bias: NDArray[np.float32]
    scale: NDArray[np.float16]

    def __post_init__(self) -> None:
        layers, ffn = self.order.shape
        routers, biases = self.router.shape, self.router_bias.shape
        if routers[0] != layers or biases != routers[:2]:
            raise ModelError(f"recipe: {layers} layers of neurons, but routers {routers} and biases {biases}")
        scales = (layers, 1 + self.experts, routers[2])
        if self.scale.shape != scales:
            raise ModelError(
                f"recipe: scales {self.scale.shape}, must be {scales}: one for each channel of the shared "
                "expert's output and of each routed expert's, in every layer"
            )
        if not (np.isfinite(self.scale) & (self.scale > 0)).all():
            raise ModelError("recipe: a scale is not a positive number")
        if not np.isfinite(self.router_bias).all():
            raise ModelError("recipe: a router bias is not a number")
        if not np.array_equal(np.sort(self.order, axis=1), np.tile(np.arange(ffn), (layers, 1))):
            raise ModelError(f"recipe: a layer's order is not a permutation of its {ffn} neurons")
        routed = ffn - self.shared
        if not 0 < routed < ffn or routed % self.experts or self.shared % self.expert_width:
            raise ModelError(
                f"recipe: {ffn} neurons do not split into {self.shared} shared and {self.experts} experts"
            )
        if not 0 < self.experts_per_token <= self.experts:
            raise ModelError(f"recipe: {self.experts_per_token} experts a token, must be 1 to {self.experts}")

    @property
    def layers(self) -> int:
        return int(self.order.shape[0])

    @property
    def experts(self) -> int:
        return int(self.router.shape[1])

    @property
    def expert_width(self) -> int:
        """Neurons of one routed expert."""
        return int(self.order.shape[1] - self.shared) // self.experts

    def shared_neurons(self, layer: int) -> NDArray[np.uint16]:
        """Neuron ids of the shared expert, [shared]."""
        return self.order[layer, : self.shared]

    def expert_neurons(self, layer: int, expert: int) -> NDArray[np.uint16]:
        """Neuron ids of one routed expert, [expert_width]."""
        first = self.shared + expert * self.expert_width
        return self.order[layer, first : first + self.expert_width]

    def neuron_scale(self, layer: int) -> NDArray[np.float32]:
        """What `down_proj` is multiplied with, by neuron id, [hidden, ffn]."""
        widths = [self.shared, *[self.expert_width] * self.experts]
        scale = np.empty((self.scale.shape[2], self.order.shape[1]), np.float32)
        scale[:, self.order[layer]] = np.repeat(self.scale[layer].T, widths, axis=1)
        return scale

    def neutral(self) -> "Recipe":
        """The same neurons in the same places, but with every expert active at weight 1: the dense model."""
        return replace(
            self,
            experts_per_token=self.experts,
            router=np.zeros_like(self.router),
            router_bias=np.zeros_like(self.router_bias),
            scale=np.ones_like(self.scale),
        )


def load_recipe(path: Path, sha256: str) -> Recipe:
    """Read a recipe; `ModelError` if the file is not exactly the one whose sha256 is given."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ModelError(f"{path}: sha256 is {found}, must be {sha256}; reinstall Coli")
    return read_recipe(path)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe of one's own; `ModelError` if the file is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            described = json.loads((file.metadata() or {})["recipe"])
            if described["format"] != FORMAT:
                raise ModelError(f"{path}: format is {described['format']!r}, must be {FORMAT!r}")
            return Recipe(
                shared=int(described["shared"]),
                experts_per_token=int(described["experts_per_token"]),
                order=file.get_tensor("order"),
                router=file.get_tensor("router"),
                router_bias=file.get_tensor("router_bias"),
                scale=file.get_tensor("scale"),
            )
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ModelError(f"{path}: not a recipe: {error}") from error


def dump_recipe(recipe: Recipe) -> bytes:
    """The bytes of a recipe file; equal recipes give equal bytes."""
    arrays = {
        "order": recipe.order,
        "router": recipe.router,
        "router_bias": recipe.router_bias,
        "scale": recipe.scale,
    }
    described = {
        "format": FORMAT,
        "shared": recipe.shared,
        "experts_per_token": recipe.experts_per_token,
    }
    # One entry, because safetensors writes several in an order that changes from run to run.
    return bytes(save(arrays, {"recipe": json.dumps(described)}))
