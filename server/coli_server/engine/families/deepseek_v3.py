"""DeepSeek-V3, V3.1 and R1 in bfloat16, and Moonlight; arXiv:2412.19437."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import Family, expert_count, experts_per_token, sigmoid_router
from coli_server.engine.families.mla import (
    IGNORED,
    IRRELEVANT,
    decoder,
    first_dense_layers,
    latent_attention,
    refuse_quantization,
    shared_experts,
)
from coli_server.engine.spec import ModelSpec, MoeMlp


def read(config: Config) -> ModelSpec:
    """Latent attention, sigmoid router with groups and correction bias, a shared expert."""
    refuse_quantization(config)
    config.choice("mlp_bias", (False,), False)
    experts = expert_count(config, "n_routed_experts", "num_local_experts", "num_experts")
    width = config.integer("moe_intermediate_size")
    k = experts_per_token(config, experts)
    moe = MoeMlp(
        experts=experts,
        k=k,
        width=width,
        router=sigmoid_router(config, experts, k),
        shared=shared_experts(config, width),
    )
    attention = latent_attention(config, interleaved=config.flag("rope_interleave", True))
    return decoder(config, "deepseek_v3", attention, moe, first_dense_layers(config, 3), norm_eps=1e-6)


FAMILY = Family("deepseek_v3", read, ignored=IGNORED, irrelevant=IRRELEVANT)
