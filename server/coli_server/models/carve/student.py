"""The dense model and the carved one in torch: one set of frozen weights, and routers that learn.

Weights are bfloat16, the residual stream and the routers are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from coli_server.models.dense import DenseConfig, DenseModel, bfloat16_bits, bfloat16_values
from coli_server.models.recipe import Recipe

Tensor = Any
"""torch.Tensor; torch is an extra, so type checkers do without it."""


@dataclass(frozen=True)
class FrozenLayer:
    """One layer's weights, bfloat16, [out, in]; norms are float32. Neurons are in the recipe's order."""

    attention_norm: Tensor
    qkv: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Frozen:
    """What both models share."""

    config: DenseConfig
    shared: int
    """Neurons of the shared expert."""
    embedding: Tensor
    norm: Tensor
    layers: Sequence[FrozenLayer]


@dataclass(frozen=True)
class Routers:
    """What is learnt, in float32, for all layers at once.

    A router's weights are `direction * size`, where direction starts with a root mean square of 1: so one
    learning rate suits layers of different size.
    """

    direction: Tensor
    """[layers, experts, hidden]"""
    size: Tensor
    """[layers], fixed"""
    bias: Tensor
    """[layers, experts]"""
    log_scale: Tensor
    """Logarithms of output scales, shared expert first, [layers, 1 + experts, hidden]."""

    def logits(self, layer: int, u: Tensor) -> Tensor:
        return functional.linear(u, self.direction[layer] * self.size[layer])

    def scaled(self, layer: int, down: Tensor, shared: int) -> Tensor:
        """`down` [hidden, neurons], in the recipe's order, with the output scales in it, bfloat16."""
        scale = self.log_scale[layer].exp()
        width = (down.shape[1] - shared) // (len(scale) - 1)
        by_neuron = torch.cat([scale[:1].expand(shared, -1), scale[1:].repeat_interleave(width, dim=0)])
        return (down * by_neuron.T).bfloat16()


def load_frozen(dense: DenseModel, recipe: Recipe) -> Frozen:
    def tensor(name: str) -> Tensor:
        return torch.from_numpy(dense.tensor(name).copy()).bfloat16()

    layers = []
    for number in range(dense.config.layers):
        prefix = f"model.layers.{number}."
        order = torch.from_numpy(recipe.order[number].astype(np.int64))
        gate, up, down = (tensor(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        layers.append(
            FrozenLayer(
                attention_norm=tensor(prefix + "input_layernorm.weight").float(),
                qkv=torch.cat([tensor(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]),
                o=tensor(prefix + "self_attn.o_proj.weight"),
                ffn_norm=tensor(prefix + "post_attention_layernorm.weight").float(),
                gate_up=torch.cat([gate[order], up[order]]),
                down=down[:, order].contiguous(),
            )
        )
    return Frozen(
        dense.config,
        recipe.shared,
        tensor("model.embed_tokens.weight"),
        tensor("model.norm.weight").float(),
        layers,
    )


def starting_routers(frozen: Frozen, recipe: Recipe, ids: Tensor, spread: float) -> Routers:
    """The recipe's routers, grown until their logits on `ids` deviate by at least `spread` in each layer.

    The order of the scores stays nearly the same: the bias grows with the weights.
    """
    weight = torch.from_numpy(bfloat16_values(recipe.router))
    bias = torch.from_numpy(recipe.router_bias.copy())
    scale = torch.from_numpy(recipe.scale.astype(np.float32))
    size = weight.square().mean(dim=(1, 2)).sqrt()
    routers = Routers(weight / size[:, None, None], size, bias, scale.log())
    deviations: list[Tensor] = []
    with torch.no_grad():
        hidden_states(frozen, ids, routers, recipe.experts_per_token, 1.0, deviations)
    growth = (spread / torch.stack(deviations)).clamp(min=1)
    return Routers(routers.direction, size * growth, bias * growth[:, None], routers.log_scale)


def finished_recipe(start: Recipe, routers: Routers) -> Recipe:
    """The recipe with what was learnt."""
    weight = (routers.direction * routers.size[:, None, None]).detach().numpy()
    return Recipe(
        shared=start.shared,
        experts_per_token=start.experts_per_token,
        order=start.order,
        router=bfloat16_bits(weight),
        router_bias=routers.bias.detach().numpy().copy(),
        scale=routers.log_scale.detach().exp().numpy().astype(np.float16),
    )


def log_probabilities(frozen: Frozen, states: Tensor) -> Tensor:
    """Of the whole vocabulary, from final states [..., hidden]."""
    logits = functional.linear(states.bfloat16(), frozen.embedding).float()
    return functional.log_softmax(logits, dim=-1)


def hidden_states(
    frozen: Frozen,
    ids: Tensor,
    routers: Routers | None = None,
    k: int = 0,
    temperature: float = 1.0,
    deviations: list[Tensor] | None = None,
) -> Tensor:
    """Final states [windows, tokens, hidden] of the dense model, or of the carved one with k experts.

    temperature: see `gates`. deviations: gets the standard deviation of each layer's router logits.
    """
    config = frozen.config
    x = functional.embedding(ids, frozen.embedding).float()
    turn = rotary(config, ids.shape[1])
    for number, layer in enumerate(frozen.layers):
        x = x + attention(config, layer, x, turn)
        u = functional.rms_norm(x, (config.hidden,), layer.ffn_norm, config.norm_eps)
        gate, up = functional.linear(u.bfloat16(), layer.gate_up).chunk(2, dim=-1)
        activation = functional.silu(gate) * up
        down = layer.down
        if routers is not None:
            logits = routers.logits(number, u)
            if deviations is not None:
                deviations.append(logits.std())
            by_neuron = gates(
                logits,
                routers.bias[number],
                k,
                temperature,
                frozen.shared,
                config.ffn,
            )
            activation = activation * by_neuron.bfloat16()
            down = routers.scaled(number, down, frozen.shared)
        x = x + functional.linear(activation, down).float()
    return functional.rms_norm(x, (config.hidden,), frozen.norm, config.norm_eps)


def gates(logits: Tensor, bias: Tensor, k: int, temperature: float, shared: int, neurons: int) -> Tensor:
    """What each neuron's activation is multiplied with, [..., neurons], from router logits [..., experts].

    The k best by sigmoid + bias are chosen. The choice itself has no gradient, so in the backward pass it
    is a soft one: a sigmoid, `temperature` wide, around the border between rank k and k + 1.
    """
    scores = torch.sigmoid(logits)
    ranked = scores + bias
    chosen = torch.zeros_like(ranked).scatter(-1, ranked.topk(k, dim=-1).indices, 1.0)
    if torch.is_grad_enabled():
        best = ranked.topk(k + 1, dim=-1).values
        border = (best[..., k - 1] + best[..., k])[..., None] / 2
        soft = torch.sigmoid((ranked - border) / temperature)
        chosen = soft + (chosen - soft).detach()
    experts = (2 * scores * chosen).repeat_interleave((neurons - shared) // scores.shape[-1], dim=-1)
    return torch.cat([torch.ones_like(experts[..., :1]).expand(*experts.shape[:-1], shared), experts], dim=-1)


def rotary(config: DenseConfig, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [tokens, head_dim], the same for both halves of a head."""
    frequency = 1 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angle = torch.outer(torch.arange(tokens).float(), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def attention(config: DenseConfig, layer: FrozenLayer, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """What causal attention adds to the residual stream x, [windows, tokens, hidden]."""
    windows, tokens, _ = x.shape
    cos, sin = turn
    h = functional.rms_norm(x, (config.hidden,), layer.attention_norm, config.norm_eps)
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q, k, v = functional.linear(h.bfloat16(), layer.qkv).split([width, kv_width, kv_width], dim=-1)

    def heads(values: Tensor, count: int) -> Tensor:
        return values.view(windows, tokens, count, config.head_dim).transpose(1, 2)

    def turned(values: Tensor, count: int) -> Tensor:
        values = heads(values, count).float()
        a, b = values.chunk(2, dim=-1)
        return (values * cos + torch.cat([-b, a], dim=-1) * sin).bfloat16()

    group = config.heads // config.kv_heads
    mixed = functional.scaled_dot_product_attention(
        turned(q, config.heads),
        turned(k, config.kv_heads).repeat_interleave(group, dim=1),
        heads(v, config.kv_heads).repeat_interleave(group, dim=1),
        is_causal=True,
    )
    return functional.linear(mixed.transpose(1, 2).reshape(windows, tokens, -1), layer.o).float()
