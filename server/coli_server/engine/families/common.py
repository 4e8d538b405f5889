"""What every family file provides, and the names that most checkpoints on the hub share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coli_server.engine.config import Config
from coli_server.engine.spec import Activation, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Each expert has tensors of its own: gate and up [width, hidden], down [hidden, width]."""

    gate: str = "mlp.experts.{expert}.gate_proj.weight"
    up: str = "mlp.experts.{expert}.up_proj.weight"
    down: str = "mlp.experts.{expert}.down_proj.weight"


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
    dense: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    shared: tuple[str, str, str] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    router: str = "mlp.gate"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    experts: SeparateExperts = SeparateExperts()


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how its `config.json` reads, and what its tensors are called.

    `ignored` are regular expressions of tensor names that a checkpoint may hold and inference does not
    need; any other tensor that nobody asks for is refused.
    """

    model_type: str
    read: Callable[[Config], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
    ignored: tuple[str, ...] = ()


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


def experts_per_token(config: Config, experts: int) -> int:
    """`num_experts_per_tok`, at most the number of experts."""
    return config.integer("num_experts_per_tok", high=experts)
