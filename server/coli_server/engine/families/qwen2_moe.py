"""Qwen1.5-MoE and Qwen2-MoE (Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen2-57B-A14B), arXiv:2407.10671."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import (
    ROTARY_BUFFERS,
    Family,
    TensorNames,
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
    SharedExpert,
)


def read(config: Config) -> ModelSpec:
    """A gated shared expert, biases on queries, keys and values, sliding windows in some layers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings")
    experts = expert_count(config, "num_experts", "num_local_experts")
    layers = layer_count(config)
    size = head_dim(config, hidden, heads)
    rope = read_rope(config, size, context_length=context)
    activation = silu(config)
    query_heads = kv_heads(config, heads)
    bias = config.flag("qkv_bias", True)
    attentions = [
        GroupedQueryAttention(heads, query_heads, size, rope, size**-0.5, qkv_bias=bias, window=window)
        for window in _windows(config, layers)
    ]
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=config.integer("moe_intermediate_size"),
        router=Router("softmax", renormalize=config.flag("norm_topk_prob", False)),
        shared=SharedExpert(config.integer("shared_expert_intermediate_size"), gated=True),
        activation=activation,
    )
    dense = DenseMlp(config.integer("intermediate_size"), activation)
    without_experts = dense_layers(config, layers)
    return ModelSpec(
        model_type="qwen2_moe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=tuple(
            LayerSpec(attention, dense if i in without_experts else moe)
            for i, attention in enumerate(attentions)
        ),
        norm=rms_norm(config),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _windows(config: Config, layers: int) -> list[int]:
    """The sliding window of each layer; 0 where there is none.

    Without `layer_types`, every second one of the first `max_window_layers` layers has the window, as in
    the reference implementation.
    """
    sliding = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window") if sliding else config.integer("sliding_window", 0, low=0)
    first = config.integer("max_window_layers", 28, low=0)
    types = config.words("layer_types", layers, ("full_attention", "sliding_attention"))
    if types is None:
        return [window if sliding and i < first and i % 2 == 0 else 0 for i in range(layers)]
    if "sliding_attention" in types and not sliding:
        raise config.error("layer_types", "full_attention alone, while use_sliding_window is not true")
    return [window if kind == "sliding_attention" else 0 for kind in types]


NAMES = TensorNames(
    shared=(
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    ),
)
FAMILY = Family("qwen2_moe", read, NAMES, ignored=(ROTARY_BUFFERS,))
