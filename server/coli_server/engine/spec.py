"""What a model is made of, in the terms that all families share.

A family file turns `config.json` into a `ModelSpec`; everything else (loading, the forward pass, memory
planning, inspection) reads the spec and never the family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of `dim` leading dimensions of a head.

    `scaling` holds the parameters of the rope type as they stand in the configuration.
    """

    dim: int
    theta: float
    type: str = "default"
    interleaved: bool = False
    scaling: Mapping[str, object] = field(default_factory=dict)
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """`rms`: x / rms(x) * weight. `layer`: (x - mean) / std * weight + bias."""

    kind: Literal["rms", "layer"]
    eps: float


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention whose `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    clip: float | None = None  # normalised q and k, and v are clipped to [-clip, clip]
    window: int = 0  # a position sees the last `window` ones, itself included; 0 = all
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Indexer:
    """The selector of sparse attention: each position attends to the `topk` best-scored earlier ones."""

    heads: int
    head_dim: int
    topk: int
    shared: bool = False  # reuses the selection of the last full indexer before this layer


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are expanded from a cached latent of `kv_rank`."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    norm_eps: float = 1e-6
    bias: bool = False
    indexer: Indexer | None = None


Attention = GroupedQueryAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class Activation:
    """`silu`: silu(gate) * up. `clamped`: gpt-oss's SwiGLU with `alpha` and `limit`."""

    kind: Literal["silu", "clamped"] = "silu"
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A feed-forward block that every token runs, `width` neurons wide; `bias`: its matrices have one."""

    width: int
    activation: Activation = Activation()
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """How router logits become ranking scores and gate masses (docs/CACHE_ROUTE.md).

    `softmax`: both are the softmax over all experts. `sigmoid`: mass = sigmoid, score = mass + correction
    bias. `sparsemixer`: see engine/routers.py. With groups only the experts of the `topk_groups` best
    groups may be chosen; a group's score is its best expert (`max`) or its two best together (`top2`).
    """

    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    bias: bool = False  # a bias on the logits
    correction_bias: bool = False  # a bias on the ranking scores
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"
    jitter: float = 0.0  # sparsemixer's near-tie threshold


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Runs for every token beside the routed ones; `gated`: times sigmoid(x . gate)."""

    width: int
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """`experts` routed experts of `width` neurons, `k` of which run for a token."""

    experts: int
    k: int
    width: int
    router: Router
    shared: SharedExpert | None = None
    activation: Activation = Activation()
    expert_bias: bool = False
    mxfp4: bool = False  # the experts are stored in 4 bits and widened to bfloat16 as they are read


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: Attention
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. Multipliers are 1 in all families but granite's."""

    model_type: str
    hidden: int
    vocab: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied_embeddings: bool = False
    head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    eos_ids: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have routed experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeMlp))

    @property
    def moe(self) -> MoeMlp:
        """The routed feed-forward block, which has the same shape in every layer that has one."""
        return next(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp))
