"""gpt-oss (openai/gpt-oss-20b and gpt-oss-120b), arXiv:2508.10925; experts in MXFP4 or in plain floats."""

from __future__ import annotations

from dataclasses import replace

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    Family,
    PackedExperts,
    TensorNames,
    expert_count,
    experts_per_token,
    kv_heads,
    layer_count,
    rms_norm,
    silu,
)
from coli_server.engine.rope import read_rope
from coli_server.engine.spec import (
    Activation,
    GroupedQueryAttention,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    RopeSpec,
    Router,
)

_YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Config) -> ModelSpec:
    """Attention sinks, windows in every second layer, biases everywhere, softmax over the chosen experts."""
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    silu(config)  # named so by the configuration; the experts have a clamped form of it
    experts = expert_count(config, "num_local_experts", "num_experts")
    k = experts_per_token(config, experts)
    config.choice("experts_per_token", (k,), k)
    moe = MoeMlp(
        experts=experts,
        k=k,
        width=width,
        router=Router("softmax", renormalize=True, bias=True),
        activation=Activation(
            "clamped",
            alpha=config.positive("swiglu_alpha", 1.702),
            limit=config.positive("swiglu_limit", 7.0),
        ),
        expert_bias=True,
        mxfp4=mxfp4(config, hidden, width),
    )
    return ModelSpec(
        model_type="gpt_oss",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
        layers=tuple(LayerSpec(attention, moe) for attention in attention_layers(config)),
        norm=rms_norm(config, 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def attention_layers(config: Config) -> list[GroupedQueryAttention]:
    """The attention of every layer: full, or over a window."""
    heads, size = config.integer("num_attention_heads"), config.integer("head_dim", 64, low=2)
    bias = config.flag("attention_bias", True)
    full = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope(config, size),
        scale=size**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    layers = layer_count(config)
    kinds = config.words("layer_types", layers, ("sliding_attention", "full_attention"))
    if kinds is None:
        kinds = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    sliding = replace(full, window=config.integer("sliding_window", 128))
    return [sliding if kind == "sliding_attention" else full for kind in kinds]


def rope(config: Config, head_dim: int) -> RopeSpec:
    """YaRN as the published models have it, where the configuration says nothing else."""
    context = config.integer("max_position_embeddings")
    read = read_rope(config, head_dim, context_length=context, theta=150000.0)
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return read
    return replace(read, type="yarn", scaling=_YARN)


def mxfp4(config: Config, hidden: int, width: int) -> bool:
    """Whether the experts are stored in MXFP4. Raises ConfigError for any other quantisation."""
    section = config.section("quantization_config")
    if section is None:
        return False
    section.choice("quant_method", ("mxfp4",))
    section.flag("dequantize", False)  # how much memory other programs spend, not what is stored
    kept = section.raw("modules_to_not_convert", [])
    if not isinstance(kept, list) or any(not isinstance(name, str) or "experts" in name for name in kept):
        raise section.error("modules_to_not_convert", "names of modules, none of them experts")
    section.finish()
    for key, size in (("hidden_size", hidden), ("intermediate_size", width)):
        if size % 32:
            raise config.error(key, "a multiple of 32, the weights of one MXFP4 block")
    return True


FAMILY = Family(
    "gpt_oss",
    read,
    names=TensorNames(
        router="mlp.router", experts=PackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ),
    irrelevant=frozenset({"initial_context_length"}),
)
