"""GLM-5 (zai-org/GLM-5 and its kin): latent attention over positions that a sparse indexer picks."""

from __future__ import annotations

from dataclasses import replace

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
from coli_server.engine.spec import Indexer, LatentAttention, ModelSpec, MoeMlp


def read(config: Config) -> ModelSpec:
    """DeepSeek-V3's router and shared expert; a layer has an indexer or shares that of an earlier one."""
    refuse_quantization(config)
    config.choice("mlp_bias", (False,), False)
    config.choice("rope_interleave", (True,), True)
    config.choice("indexer_rope_interleave", (True,), True)
    config.choice("moe_router_dtype", ("float32",), "float32")
    config.raw("index_share_for_mtp_iteration")  # of the layers behind the last one, which never run here
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
    dense = dense_layers(config)
    config.words("layer_types", len(dense), ("indexed_attention", "deepseek_sparse_attention"))
    attention = sparse_attention(config, len(dense))
    return decoder(config, "glm_moe_dsa", attention, moe, dense, norm_eps=1e-5)


def dense_layers(config: Config) -> list[bool]:
    """Which layers are dense: `mlp_layer_types` where there is one, else the first few."""
    leading = first_dense_layers(config, 3)
    kinds = config.words("mlp_layer_types", len(leading), ("dense", "sparse"))
    return leading if kinds is None else [kind == "dense" for kind in kinds]


def sparse_attention(config: Config, layers: int) -> list[LatentAttention]:
    """The attention of every layer, with its indexer or a shared one."""
    attention = latent_attention(config, interleaved=True)
    if attention.q_rank is None:
        raise config.error("q_lora_rank", "a number: the indexer reads the low-rank form of the queries")
    indexer = Indexer(
        heads=config.integer("index_n_heads", 32),
        head_dim=config.integer("index_head_dim", 128, low=attention.rope_dim),
        topk=config.integer("index_topk", 2048),
    )
    return [
        replace(attention, indexer=replace(indexer, shared=shared))
        for shared in shared_indexers(config, layers)
    ]


def shared_indexers(config: Config, layers: int) -> list[bool]:
    """Which layers share: by name, by a pattern of F and S, or all but every so many-th layer."""
    every = config.integer("index_topk_freq", 1)
    offset = config.integer("index_skip_topk_offset", 2, low=0)
    pattern = config.raw("index_topk_pattern")
    kinds = config.words("indexer_types", layers, ("full", "shared"))
    if kinds is not None:
        shared, key = [kind == "shared" for kind in kinds], "indexer_types"
    elif pattern is None:
        shared = [max(i - offset + 1, 0) % every != 0 for i in range(layers)]
        key = "index_skip_topk_offset"
    elif isinstance(pattern, str) and len(pattern) == layers and set(pattern) <= {"F", "S"}:
        shared, key = [letter == "S" for letter in pattern], "index_topk_pattern"
    else:
        raise config.error("index_topk_pattern", f"{layers} letters F (full) or S (shared)")
    if shared[0]:
        raise config.error(key, "a full indexer in the first layer, for others to share")
    return shared


FAMILY = Family("glm_moe_dsa", read, ignored=IGNORED, irrelevant=IRRELEVANT)
