"""Qwen3-MoE (Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder and their kin), arXiv:2505.09388."""

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
from coli_server.engine.families.sparse_layers import dense_layers
from coli_server.engine.rope import longest_context, read_rope
from coli_server.engine.spec import (
    DenseMlp,
    GroupedQueryAttention,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    Router,
)


def read(config: Config) -> ModelSpec:
    """Softmax router, norms over each query and key head, one optional sliding window for all layers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    experts = expert_count(config, "num_experts", "num_local_experts")
    layers = layer_count(config)
    size = head_dim(config, hidden, heads)
    rope = read_rope(config, size, context_length=context)
    activation = silu(config)
    bias = config.flag("attention_bias", False)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=size**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        window=_window(config, layers),
    )
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=config.integer("moe_intermediate_size"),
        router=Router("softmax", renormalize=config.flag("norm_topk_prob", False)),
        activation=activation,
    )
    # Published folders carry these keys, with values that say what every model of the family is.
    config.choice("use_qk_norm", (True,), True)
    config.choice("qkv_bias", (bias,), bias)
    config.choice("shared_expert_intermediate_size", (0,), 0)
    dense = DenseMlp(config.integer("intermediate_size"), activation)
    without_experts = dense_layers(config, layers)
    return ModelSpec(
        model_type="qwen3_moe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=tuple(LayerSpec(attention, dense if i in without_experts else moe) for i in range(layers)),
        norm=rms_norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _window(config: Config, layers: int) -> int:
    """The sliding window of all layers, 0 for none; the reference implementation knows no other form."""
    sliding = config.flag("use_sliding_window", False)
    kind = "sliding_attention" if sliding else "full_attention"
    if not set(config.words("layer_types", layers, ("full_attention", "sliding_attention")) or ()) <= {kind}:
        raise config.error("layer_types", f"{kind} alone, as use_sliding_window says")
    window = config.integer("sliding_window") if sliding else config.integer("sliding_window", 0, low=0)
    return window if sliding else 0


FAMILY = Family("qwen3_moe", read, ignored=(ROTARY_BUFFERS,), irrelevant=frozenset({"max_window_layers"}))
