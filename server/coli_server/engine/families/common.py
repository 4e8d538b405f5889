"""What every family file provides, and the names that most checkpoints on the hub share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coli_server.engine.config import Config
from coli_server.engine.spec import Activation, ModelSpec, NormSpec, Router

MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 14


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Each expert has tensors of its own: gate and up [width, hidden], down [hidden, width]."""

    gate: str = "mlp.experts.{expert}.gate_proj.weight"
    up: str = "mlp.experts.{expert}.up_proj.weight"
    down: str = "mlp.experts.{expert}.down_proj.weight"


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """All experts of a layer in two tensors: [experts, 2 * width, hidden], whose rows are those of gate and
    then those of up, and [experts, hidden, width]."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gpt-oss's: all experts of a layer in tensors that engine/packed_experts.py describes, with biases."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Hub names of the tensors by role. Names of a layer follow `layer`, whose `{layer}` is the index."""

    embeddings: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    indexer: str = "self_attn.indexer."
    dense: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    shared: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    experts: SeparateExperts | FusedExperts | PackedExperts = SeparateExperts()


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how its `config.json` reads, and what its tensors are called.

    `ignored` are regular expressions of tensor names that a checkpoint may hold and inference does not
    need; any other tensor that nobody asks for is refused. `irrelevant` are keys of its `config.json` that
    cannot change what a trained model answers, beside those of `config.IRRELEVANT`.
    """

    model_type: str
    read: Callable[[Config], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
    ignored: tuple[str, ...] = ()
    irrelevant: frozenset[str] = frozenset()


# Older savers wrote the rotary frequencies, which follow from the configuration, into every layer.
ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    experts=SeparateExperts(
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
    ),
)
"""The names that Mixtral introduced; others took them over."""


def rms_norm(config: Config, default: float = 1e-6) -> NormSpec:
    return NormSpec("rms", config.positive("rms_norm_eps", default))


def silu(config: Config) -> Activation:
    """The `hidden_act` of a family that publishes only SiLU models."""
    config.choice("hidden_act", ("silu", "swish"), "silu")
    return Activation("silu")


def head_dim(config: Config, hidden: int, heads: int) -> int:
    """The explicit `head_dim`, or hidden / heads."""
    explicit = config.optional_integer("head_dim")
    if explicit is not None:
        return explicit
    if hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of hidden_size={hidden}")
    return hidden // heads


def kv_heads(config: Config, heads: int) -> int:
    """`num_key_value_heads`, which must divide the number of query heads."""
    count = config.integer("num_key_value_heads", heads)
    if heads % count:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    return count


def expert_count(config: Config, *keys: str) -> int:
    """The number of routed experts of a layer, under the first of `keys` that is there; all must agree."""
    given = [key for key in keys if config.has(key)] or list(keys[:1])
    count = config.integer(given[0], high=MAX_EXPERTS)
    for key in given[1:]:
        config.choice(key, (count,))
    return count


def layer_count(config: Config) -> int:
    """`num_hidden_layers`."""
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def experts_per_token(config: Config, experts: int) -> int:
    """`num_experts_per_tok`, at most the number of experts."""
    return config.integer("num_experts_per_tok", high=experts)


def sigmoid_router(config: Config, experts: int, k: int, *, scale: float = 2.5) -> Router:
    """Sigmoid scores with a correction bias, limited to the best groups (DeepSeek-V3, arXiv:2412.19437).

    `scale` is the family's default of `routed_scaling_factor`.
    """
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    groups = config.integer("n_group", 1, high=experts)
    kept = config.integer("topk_group", 1, high=groups)
    check_groups(config, experts, groups, kept, k)
    return Router(
        "sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.positive("routed_scaling_factor", scale),
        correction_bias=True,
        groups=groups,
        topk_groups=kept,
        group_score="top2",
    )


def check_groups(config: Config, experts: int, groups: int, kept: int, k: int) -> None:
    """Raise ConfigError for groups of unequal size, or too few of them kept to choose `k` experts from."""
    if experts % groups:
        raise config.error("n_group", f"a divisor of n_routed_experts={experts}")
    if kept * (experts // groups) < k:
        raise config.error("topk_group", f"enough groups of {experts // groups} to choose {k} experts from")
