"""OLMoE (allenai/OLMoE-1B-7B-0924 and its kin), arXiv:2409.02060."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    ROTARY_BUFFERS,
    Family,
    expert_count,
    experts_per_token,
    head_dim,
    kv_heads,
    layer_count,
    rms_norm,
    silu,
)
from coli_server.engine.rope import longest_context, read_rope
from coli_server.engine.spec import GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp, Router


def read(config: Config) -> ModelSpec:
    """Softmax router without renormalisation, RMS norms over the whole query and key, optional clipping
    of the normalised queries and keys and of the values."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context, experts = (
        config.integer("max_position_embeddings"),
        expert_count(config, "num_experts", "num_local_experts"),
    )
    size = head_dim(config, hidden, heads)
    if size * heads != hidden:  # the norms over whole queries and keys have hidden_size weights
        raise config.error("head_dim", f"hidden_size / num_attention_heads = {hidden / heads:g}")
    bias = config.flag("attention_bias", False)
    norm = rms_norm(config, 1e-5)
    rope = read_rope(config, size, context_length=context)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=size**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full",
        clip=config.positive("clip_qkv") if config.has("clip_qkv") else None,
    )
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=config.integer("intermediate_size"),
        router=Router("softmax", renormalize=config.flag("norm_topk_prob", False)),
        activation=silu(config),
    )
    return ModelSpec(
        model_type="olmoe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=(LayerSpec(attention, moe),) * layer_count(config),
        norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family("olmoe", read, ignored=(ROTARY_BUFFERS,))
