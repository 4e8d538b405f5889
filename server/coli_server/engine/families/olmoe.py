"""OLMoE (allenai/OLMoE-1B-7B-0924 and its kin), arXiv:2409.02060."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    Family,
    experts_per_token,
    head_dim,
    kv_heads,
    rms_norm,
    silu,
)
from coli_server.engine.rope import read_rope
from coli_server.engine.spec import GroupedQueryAttention, LayerSpec, ModelSpec, MoeMlp, Router


def read(config: Config) -> ModelSpec:
    """Softmax router without renormalisation, RMS norms over the whole query and key, optional clipping."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context, experts = config.integer("max_position_embeddings"), config.integer("num_experts")
    size = head_dim(config, hidden, heads)
    bias = config.flag("attention_bias", False)
    norm = rms_norm(config, 1e-5)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=read_rope(config, size, context_length=context),
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
        context_length=context,
        layers=(LayerSpec(attention, moe),) * config.integer("num_hidden_layers", high=1024),
        norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


FAMILY = Family("olmoe", read)
