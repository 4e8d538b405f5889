"""GLM-4.5 and GLM-4.6 (zai-org/GLM-4.5-Air and its kin), arXiv:2508.06471."""

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
    sigmoid_router,
    silu,
)
from coli_server.engine.rope import longest_context, read_rope
from coli_server.engine.spec import (
    DenseMlp,
    GroupedQueryAttention,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    SharedExpert,
)


def read(config: Config) -> ModelSpec:
    """Sigmoid router with correction bias and groups, a shared expert, leading dense layers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context, experts = (
        config.integer("max_position_embeddings"),
        expert_count(config, "n_routed_experts", "num_local_experts"),
    )
    layers = layer_count(config)
    size = head_dim(config, hidden, heads)
    activation = silu(config)
    width = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", 1, low=0)
    rope = read_rope(config, size, context_length=context, partial=0.5)
    attention = GroupedQueryAttention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=size,
        rope=rope,
        scale=size**-0.5,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "none",
    )
    moe = MoeMlp(
        experts=experts,
        k=experts_per_token(config, experts),
        width=width,
        router=sigmoid_router(config, experts, experts_per_token(config, experts), scale=1.0),
        shared=SharedExpert(width * shared) if shared else None,
        activation=activation,
    )
    dense = DenseMlp(config.integer("intermediate_size"), activation)
    first_moe = config.integer("first_k_dense_replace", 1, low=0, high=layers)
    return ModelSpec(
        model_type="glm4_moe",
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        context_length=longest_context(rope),
        layers=tuple(LayerSpec(attention, moe if i >= first_moe else dense) for i in range(layers)),
        norm=rms_norm(config, 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


# The layers behind the last one predict further tokens in training and speculation only.
FAMILY = Family(
    "glm4_moe",
    read,
    ignored=(r"model\.layers\.{beyond}\..*", ROTARY_BUFFERS),
    irrelevant=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
)
