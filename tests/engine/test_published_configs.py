"""The config.json of published models: understood as they stand, key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coli_server.engine.config import Config
from coli_server.engine.kv import kv_bytes_per_token, kv_widths
from coli_server.engine.model import Checkpoint
from coli_server.engine.spec import DenseMlp, GroupedQueryAttention, ModelSpec

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
    "rope_scaling": None,
    "output_router_logits": False,
}
QWEN = COMMON | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
    "mlp_only_layers": [],
}
LONG_FACTORS = [1.0 + i / 8 for i in range(64)]
PUBLISHED: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-Instruct-v0.1": COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": QWEN
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
    },
    "Qwen3-Coder-30B-A3B-Instruct": QWEN
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "max_position_embeddings": 262144,
        "max_window_layers": 28,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "qkv_bias": False,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
    },
    "Phi-3.5-MoE-instruct": COMMON
    | {
        "architectures": ["PhiMoEForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"},
        "model_type": "phimoe",
        "attention_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_dropout": 0.0,
        "hidden_size": 4096,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": LONG_FACTORS,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": LONG_FACTORS,
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "vocab_size": 32064,
    },
    "granite-3.0-1b-a400m-instruct": COMMON
    | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "OLMoE-1B-7B-0924": COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "vocab_size": 50304,
    },
    "GLM-4.5-Air": COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
}
# Bytes of keys and values that a token needs, float32.
KV_BYTES = {
    "Mixtral-8x7B-Instruct-v0.1": 262144,
    "Qwen1.5-MoE-A2.7B": 393216,
    "Qwen3-Coder-30B-A3B-Instruct": 196608,
    "Phi-3.5-MoE-instruct": 262144,
    "granite-3.0-1b-a400m-instruct": 98304,
    "OLMoE-1B-7B-0924": 262144,
    "GLM-4.5-Air": 376832,
}


def read(name: str) -> ModelSpec:
    return Checkpoint.read_config(Config(PUBLISHED[name], name), Path(name))[1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_understood(name: str) -> None:
    spec = read(name)
    assert kv_bytes_per_token([kv_widths(layer.attention) for layer in spec.layers]) == KV_BYTES[name]
    assert spec.context_length == PUBLISHED[name]["max_position_embeddings"]
    assert len(spec.moe_layers) == len(spec.layers) - (1 if name == "GLM-4.5-Air" else 0)


def test_windows_of_published_configurations() -> None:
    def windows(name: str) -> set[int]:
        return {
            layer.attention.window
            for layer in read(name).layers
            if isinstance(layer.attention, GroupedQueryAttention)
        }

    assert windows("Qwen1.5-MoE-A2.7B") == windows("Qwen3-Coder-30B-A3B-Instruct") == {0}
    assert windows("Mixtral-8x7B-Instruct-v0.1") == {0}
    assert windows("Phi-3.5-MoE-instruct") == {131072}


def test_routers_of_published_configurations() -> None:
    assert not read("OLMoE-1B-7B-0924").moe.router.renormalize
    assert not read("Qwen1.5-MoE-A2.7B").moe.router.renormalize
    assert read("Qwen3-Coder-30B-A3B-Instruct").moe.router.renormalize
    assert read("Mixtral-8x7B-Instruct-v0.1").moe.router.renormalize
    assert read("Phi-3.5-MoE-instruct").moe.router.scoring == "sparsemixer"
    air = read("GLM-4.5-Air")
    assert air.moe.router.scoring == "sigmoid"
    assert isinstance(air.layers[0].mlp, DenseMlp)
    rope = air.layers[0].attention.rope
    assert rope is not None
    assert rope.dim == 64


def test_qwen3_stretched_by_yarn_serves_the_longer_context() -> None:
    """As its publisher explains it: rope_scaling is added, max_position_embeddings stays."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = PUBLISHED["Qwen3-Coder-30B-A3B-Instruct"] | {
        "max_position_embeddings": 40960,
        "rope_scaling": scaling,
    }
    spec = Checkpoint.read_config(Config(config), Path("x"))[1]
    assert spec.context_length == 131072
