"""Mixtral (mistralai/Mixtral-8x7B-v0.1, 8x22B and their kin), arXiv:2401.04088."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    MIXTRAL_NAMES,
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
    """Softmax router with renormalisation; one optional sliding window for all layers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    experts = expert_count(config, "num_local_experts", "num_experts")
    size = head_dim(config, hidden, heads)
    rope = read_rope(config, size, context_length=context, theta=1e6)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=size**-0.5,
        window=config.optional_integer("sliding_window") or 0,
    )
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=config.integer("intermediate_size"),
        router=Router("softmax", renormalize=True),
        activation=silu(config),
    )
    return ModelSpec(
        model_type="mixtral",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=(LayerSpec(attention, moe),) * layer_count(config),
        norm=rms_norm(config, 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family(
    "mixtral", read, MIXTRAL_NAMES, ignored=(ROTARY_BUFFERS,), irrelevant=frozenset({"router_jitter_noise"})
)
