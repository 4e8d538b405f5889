"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2 (deepseek-ai/DeepSeek-V2-Lite and its kin), arXiv:2405.04434."""

from __future__ import annotations

from coli_server.engine.config import Config
from coli_server.engine.families.common import Family, check_groups, expert_count, experts_per_token
from coli_server.engine.families.mla import (
    IGNORED,
    IRRELEVANT,
    decoder,
    first_dense_layers,
    latent_attention,
    refuse_quantization,
    shared_experts,
)
from coli_server.engine.spec import ModelSpec, MoeMlp, Router


def read(config: Config) -> ModelSpec:
    """Softmax router, greedy or limited to groups, without renormalisation; shared experts."""
    refuse_quantization(config)
    mlp_bias = config.flag("mlp_bias", False)
    experts = expert_count(config, "n_routed_experts", "num_local_experts", "num_experts")
    width = config.integer("moe_intermediate_size")
    k = experts_per_token(config, experts)
    moe = MoeMlp(
        experts=experts,
        k=k,
        width=width,
        router=router(config, experts, k),
        shared=shared_experts(config, width, bias=mlp_bias),
    )
    attention = latent_attention(config, interleaved=True)
    dense = first_dense_layers(config, 0)
    return decoder(config, "deepseek_v2", attention, moe, dense, norm_eps=1e-6, mlp_bias=mlp_bias)


def router(config: Config, experts: int, k: int) -> Router:
    """`greedy` looks at no groups, even where the configuration names some."""
    config.choice("scoring_func", ("softmax",), "softmax")
    # Implementations disagree on what renormalising means here; no published model asks for it.
    config.choice("norm_topk_prob", (False,), False)
    scale = config.positive("routed_scaling_factor", 1.0)
    groups = config.integer("n_group", 1, high=experts)
    kept = config.integer("topk_group", 1, high=groups)
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        return Router("softmax", scale=scale)
    check_groups(config, experts, groups, kept, k)
    return Router("softmax", scale=scale, groups=groups, topk_groups=kept, group_score="max")


FAMILY = Family("deepseek_v2", read, ignored=IGNORED, irrelevant=IRRELEVANT)
