"""Granite 3 MoE (ibm-granite/granite-3.0-1b-a400m-base and its kin)."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    ROTARY_BUFFERS,
    Family,
    FusedExperts,
    TensorNames,
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
    """Four multipliers, fused experts, and a softmax over the chosen experts' logits alone.

    That softmax equals the softmax over all experts, renormalised over the chosen ones.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    experts = expert_count(config, "num_local_experts")
    size = head_dim(config, hidden, heads)
    rope = read_rope(config, size, context_length=context)
    bias = config.flag("attention_bias", False)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=config.positive("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=config.integer("intermediate_size"),
        router=Router("softmax", renormalize=True),
        activation=silu(config),
    )
    return ModelSpec(
        model_type="granitemoe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=(LayerSpec(attention, moe),) * layer_count(config),
        norm=rms_norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        residual_multiplier=config.positive("residual_multiplier", 1.0),
        logits_divisor=config.positive("logits_scaling", 1.0),
    )


NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    experts=FusedExperts(
        gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"
    ),
)
FAMILY = Family("granitemoe", read, NAMES, ignored=(ROTARY_BUFFERS,))
