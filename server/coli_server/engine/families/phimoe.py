"""Phi-3.5-MoE (microsoft/Phi-3.5-MoE-instruct), arXiv:2404.14219; its router: arXiv:2409.12136."""

from __future__ import annotations

from dataclasses import replace

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    MIXTRAL_NAMES,
    ROTARY_BUFFERS,
    Family,
    expert_count,
    head_dim,
    kv_heads,
    layer_count,
    silu,
)
from coli_server.engine.rope import longest_context, read_rope
from coli_server.engine.spec import (
    GroupedQueryAttention,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    NormSpec,
    RopeSpec,
    Router,
)


def read(config: Config) -> ModelSpec:
    """Layer norms with biases, sparsemixer routing (always two experts), an optional bias on the head."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    experts = expert_count(config, "num_local_experts")
    size = head_dim(config, hidden, heads)
    rope = _rope(config, size, context)
    bias = config.flag("attention_bias", False)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=size**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        window=config.optional_integer("sliding_window") or 0,
    )
    moe = MoeMlp(
        experts=experts,
        k=config.choice("num_experts_per_tok", (2,), 2),
        width=config.integer("intermediate_size"),
        router=Router("sparsemixer", jitter=config.number("router_jitter_noise", 0.01, low=0.0, high=1.0)),
        activation=silu(config),
    )
    return ModelSpec(
        model_type="phimoe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=(LayerSpec(attention, moe),) * layer_count(config),
        norm=NormSpec("layer", config.positive("rms_norm_eps", 1e-5)),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        head_bias=config.flag("lm_head_bias", False),
    )


def _rope(config: Config, size: int, context: int) -> RopeSpec:
    """LongRoPE with an attention factor for short and one for long sequences, or no scaling.

    The reference implementation turns long sequences by the short factors as well, so that only the
    attention factor depends on the length. Results are compared with it, so this does the same.
    """
    rope = read_rope(config, size, context_length=context, theta=1e6, mscales=True)
    if rope.type not in ("default", "longrope"):
        key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
        raise config.error(key, "the types default and longrope")
    if rope.type == "longrope":
        rope = replace(rope, scaling={**rope.scaling, "long_factor": rope.scaling["short_factor"]})
    return rope


FAMILY = Family(
    "phimoe", read, MIXTRAL_NAMES, ignored=(ROTARY_BUFFERS,), irrelevant=frozenset({"input_jitter_noise"})
)
