"""Families with latent attention, and gpt-oss: published configurations, what is cached, refused, ignored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coli_server.engine import Engine
from coli_server.engine.config import IRRELEVANT, Config, ConfigError
from coli_server.engine.families import family_of
from coli_server.engine.kv import kv_bytes_per_token, kv_widths
from coli_server.engine.model import Checkpoint
from coli_server.engine.spec import GroupedQueryAttention, LatentAttention, ModelSpec
from coli_server.errors import ModelError

MODELS = Path(__file__).parents[1] / "data" / "models"

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V2 = V2_LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3,
    "topk_method": "group_limited_greedy",
}  # fmt: skip
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 2048, "indexer_rope_interleave": True, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "model_type": "glm_moe_dsa", "n_group": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0", "use_cache": True, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
GLM_5_2 = GLM_5 | {
    "head_dim": 192, "max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3,
    "index_topk_pattern": None, "index_share_for_mtp_iteration": True, "moe_router_dtype": "float32",
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip


def read(values: dict[str, Any]) -> ModelSpec:
    config = Config(values)
    spec = family_of(config).read(config)
    config.finish(IRRELEVANT | family_of(config).irrelevant | {"eos_token_id"})
    return spec


def kv_bytes(spec: ModelSpec) -> int:
    return kv_bytes_per_token([kv_widths(layer.attention) for layer in spec.layers])


@pytest.mark.parametrize(
    ("values", "layers", "kv_floats"),
    [
        (V2_LITE, 27, 27 * (512 + 64)),
        (V2, 60, 60 * (512 + 64)),
        (V3, 61, 61 * (512 + 64)),
        (GLM_5, 78, 78 * (512 + 64 + 128)),
        (GLM_5_2, 78, 78 * (512 + 64) + 21 * 128),
        (GPT_OSS, 24, 24 * 2 * 8 * 64),
    ],
)
def test_published_configurations_are_understood(values: dict[str, Any], layers: int, kv_floats: int) -> None:
    spec = read(values)
    assert len(spec.layers) == layers
    assert kv_bytes(spec) == 4 * kv_floats


def test_yarn_of_deepseek_moves_its_temperature_into_the_scale() -> None:
    attention = read(V2_LITE).layers[0].attention
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)


def test_gpt_oss_without_a_rope_section_has_the_published_one() -> None:
    bare = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "rope_theta")}
    assert read(bare).layers[0].attention.rope == read(GPT_OSS).layers[0].attention.rope


def test_windows_of_gpt_oss() -> None:
    attentions = [layer.attention for layer in read(GPT_OSS).layers]
    assert [a.window for a in attentions if isinstance(a, GroupedQueryAttention)] == [128, 0] * 12


def test_glm_5_2_shares_by_its_schedule_as_by_its_list() -> None:
    schedule = {key: value for key, value in GLM_5_2.items() if key != "indexer_types"}
    pattern = "FFF" + "SSSF" * 18 + "SSS"
    assert read(schedule) == read(GLM_5_2) == read(schedule | {"index_topk_pattern": pattern})


@pytest.mark.parametrize(
    ("values", "changes", "named"),
    [
        (V3, {"quantization_config": FP8}, r"quantization_config=.*fp8"),
        (V2_LITE, {"quantization_config": FP8}, r"quantization_config=.*fp8"),
        (GLM_5, {"quantization_config": FP8}, r"quantization_config=.*fp8"),
        (GPT_OSS, {"quantization_config": FP8}, r"quantization_config: quant_method=\"fp8\""),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["mlp.experts"]}},
            r"modules_to_not_convert=.*none of them experts",
        ),
        (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4", "bits": 4}}, "bits=4"),
        (GPT_OSS, {"intermediate_size": 2888}, "intermediate_size=2888.*32"),
        (GPT_OSS, {"experts_per_token": 3}, "experts_per_token=3"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types=.*24 words"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=true"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V2, {"n_group": 7}, "n_group=7.*160"),
        (V2, {"topk_group": 9}, "topk_group=9"),
        (V3, {"topk_group": 1, "n_group": 64}, "topk_group=1"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        (V3, {"qk_head_dim": 100}, "qk_head_dim=100"),
        (V3, {"head_dim": 100}, "head_dim=100"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (GLM_5, {"rope_interleave": False}, "rope_interleave=false"),
        (GLM_5, {"q_lora_rank": None}, "q_lora_rank"),
        (GLM_5, {"index_head_dim": 32}, "index_head_dim=32"),
        (GLM_5, {"indexer_types": ["shared"] + ["full"] * 77}, "indexer_types.*first layer"),
        (GLM_5, {"index_topk_pattern": "FX"}, "index_topk_pattern"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    values: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read(values | changes)


@pytest.mark.parametrize("name", ["deepseek_v2-greedy", "deepseek_v3", "glm_moe_dsa-sparse"])
def test_the_cache_holds_latents_and_not_keys(name: str) -> None:
    engine = Engine.open(MODELS / name, warm=False)
    kv = engine.new_kv(7)
    floats = 0
    for i, layer in enumerate(engine.spec.layers):
        attention = layer.attention
        assert isinstance(attention, LatentAttention)
        assert kv.keys[i].shape == (7, 1, attention.kv_rank + attention.rope_dim)
        assert kv.values[i].size == 0
        indexer = attention.indexer
        own = 0 if indexer is None or indexer.shared else indexer.head_dim
        assert kv.index[i].shape == (7, own)
        floats += attention.kv_rank + attention.rope_dim + own
    assert kv_bytes(engine.spec) == 4 * floats
    assert engine.memory.kv_token_bytes == 4 * floats
    assert kv.nbytes == 7 * 4 * floats
    engine.close()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_layers_that_predict_further_tokens_are_ignored_and_nothing_else(name: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS / name, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    extra = np.zeros(4, np.float32)
    save_file({"model.layers.3.eh_proj.weight": extra}, tmp_path / "model-2.safetensors")
    ids = np.load(MODELS / name / "expected.npz")["ids_1"].tolist()
    engine = Engine.open(tmp_path, warm=False)
    np.testing.assert_array_equal(engine.logits(ids), Engine.open(MODELS / name, warm=False).logits(ids))
    save_file({"model.layers.2.eh_proj.weight": extra}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.2\.eh_proj\.weight has no place"):
        Engine.open(tmp_path, warm=False)


@pytest.mark.parametrize(
    ("name", "section", "missing"),
    [
        ("gpt_oss-mxfp4", None, "gate_up_proj"),
        ("gpt_oss", {"quant_method": "mxfp4"}, "gate_up_proj_blocks"),
    ],
)
def test_the_stored_form_of_experts_must_be_the_configured_one(
    name: str, section: object, missing: str, tmp_path: Path
) -> None:
    shutil.copytree(MODELS / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"experts\.{missing}' is missing"):
        Checkpoint.open(tmp_path)
