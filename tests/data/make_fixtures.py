"""Makes the tiny checkpoints `tests/data/models/<family>-<variant>`: options that the others do not have.

    python tests/data/make_fixtures.py [--into FOLDER] [NAME ...]

Needs PyTorch and transformers 5, whose modelling code computes what is expected: random bfloat16 weights,
float32 arithmetic, logits of prompts of 1, 7 and 40 tokens, and 24 greedy tokens behind each. The tests read
the files and need neither. A fixture is one entry of FIXTURES: options of the family's configuration, and how
its config.json is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

PROMPTS = (1, 7, 40)
GREEDY = 24
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Fixture:
    """`model_type` and `options` make the model. `older`: config.json has the keys of transformers 4.

    `rename` gives keys of config.json other names that publishers use; `drop` leaves keys out. `mxfp4`: the
    experts are stored in four bits, as gpt-oss is published.
    """

    model_type: str
    options: dict[str, object]
    older: bool = False
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    mxfp4: bool = False


def rope(kind: str, theta: float = 10000.0, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": theta, **parameters}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
LONG = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.5, 4.0, 9.0]}

MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
}
DSA = {
    "q_lora_rank": 24,
    "index_topk": 9,
    "index_n_heads": 12,  # enough that a score is hardly ever 0: among equal ones torch chooses any
    "index_head_dim": 14,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}

FIXTURES: dict[str, Fixture] = {
    "mixtral-window": Fixture(
        "mixtral",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rope_parameters": rope("linear", 1e6, factor=2.0),
        },
        rename=(("num_local_experts", "num_experts"),),
    ),
    "mixtral-dynamic": Fixture(
        "mixtral",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_local_experts": 5,
            "max_position_embeddings": 20,
            "rope_parameters": rope("dynamic", factor=4.0),
        },
        older=True,
    ),
    "qwen2_moe-window": Fixture(
        "qwen2_moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "rope_parameters": YARN,
        },
        older=True,
        drop=("layer_types",),
    ),
    "qwen2_moe-layers": Fixture(
        "qwen2_moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen3_moe-window": Fixture(
        "qwen3_moe",
        {
            "num_experts": 8,
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
        },
        rename=(("num_local_experts", "num_experts"),),
    ),
    "qwen3_moe-dynamic": Fixture(
        "qwen3_moe",
        {
            "num_experts": 8,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "max_position_embeddings": 16,
            "rope_parameters": rope("dynamic", 1e6, factor=8.0),
        },
        older=True,
    ),
    "phimoe-longrope": Fixture(
        "phimoe",
        {
            "num_local_experts": 8,
            "router_jitter_noise": 0.4,
            "attention_bias": False,
            "lm_head_bias": False,
            "sliding_window": 30,
            "rope_parameters": rope(
                "longrope", original_max_position_embeddings=32, short_mscale=1.1, long_mscale=1.3, **LONG
            ),
        },
    ),
    "phimoe-ties": Fixture(
        "phimoe",
        {
            "num_local_experts": 12,
            "router_jitter_noise": 0.25,
            "attention_bias": True,
            "lm_head_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "granitemoe-bias": Fixture(
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
            "rope_parameters": rope("longrope", original_max_position_embeddings=24, factor=4.0, **LONG),
        },
    ),
    "granitemoe-yarn": Fixture(
        "granitemoe",
        {"num_local_experts": 6, "attention_multiplier": 0.3, "rope_parameters": YARN | {"truncate": False}},
        older=True,
    ),
    "olmoe-clip": Fixture(
        "olmoe",
        {
            "num_experts": 8,
            "clip_qkv": 0.6,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        rename=(("num_experts", "num_local_experts"),),
    ),
    "glm4_moe-groups": Fixture(
        "glm4_moe",
        {
            "n_routed_experts": 12,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "use_qk_norm": False,
            "attention_bias": False,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": rope("linear", factor=3.0, partial_rotary_factor=0.75),
        },
    ),
    "glm4_moe-dense": Fixture(
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 2,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 8,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "partial_rotary_factor": 0.5},
        },
        older=True,
    ),
    "deepseek_v2-groups": Fixture(
        "deepseek_v2",
        MLA
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        older=True,
    ),
    "deepseek_v2-greedy": Fixture(
        "deepseek_v2",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "topk_method": "greedy",
            "n_group": 3,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "mlp_bias": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek_v3-halves": Fixture(
        "deepseek_v3",
        MLA
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        older=True,
    ),
    "deepseek_v3-groups": Fixture(
        "deepseek_v3",
        MLA
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 12,
            "num_experts_per_tok": 5,
            "n_group": 6,
            "topk_group": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "rope_parameters": rope("linear", factor=2.0),
        },
    ),
    "glm_moe_dsa-sparse": Fixture(
        "glm_moe_dsa",
        MLA
        | DSA
        | {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "glm_moe_dsa-pattern": Fixture(
        "glm_moe_dsa",
        MLA
        | DSA
        | {
            "num_hidden_layers": 5,
            "index_topk": 17,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
            "first_k_dense_replace": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
        },
        older=True,
        drop=("indexer_types", "mlp_layer_types", "layer_types"),
    ),
    "gpt_oss-window": Fixture(
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 5,
            "attention_bias": False,
            "swiglu_alpha": 1.2,
            "swiglu_limit": 0.9,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "rope_parameters": YARN | {"truncate": True, "beta_fast": 16.0},
        },
        older=True,
        drop=("layer_types",),
    ),
    "gpt_oss-mxfp4": Fixture(
        "gpt_oss",
        {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_local_experts": 5,
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
        mxfp4=True,
    ),
}


def make(name: str, folder: Path) -> None:
    """Write the checkpoint `name` and what is expected of it into `folder`."""
    fixture = FIXTURES[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(fixture.model_type, **{**COMMON, **fixture.options})
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    codes = mxfp4_codes(model) if fixture.mxfp4 else {}
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    np.savez_compressed(folder / "expected.npz", **expected(model, config.vocab_size))
    if codes:
        store_codes(folder / "model.safetensors", codes)
    path = folder / "config.json"
    path.write_text(json.dumps(written(fixture, json.loads(path.read_text())), indent=2) + "\n")


def randomize(model: PreTrainedModel) -> None:
    """Norms near 1, everything else near 0, so that every weight and bias matters."""
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")
    }
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.normal_(0.0, 0.3)
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1.0)


def mxfp4_codes(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random blocks and scales by hub name; the experts of `model` get the weights that they stand for."""
    codes: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensor.data = convert_moe_packed_tensors(blocks, scales)
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return codes


def store_codes(file: Path, codes: dict[str, torch.Tensor]) -> None:
    """Put blocks and scales in the place of the weights that they stand for."""
    replaced = {name.rsplit("_", 1)[0] for name in codes}
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in replaced}
    save_file(kept | codes, file, metadata={"format": "pt"})


def expected(model: PreTrainedModel, vocab: int) -> dict[str, np.ndarray]:
    """Logits of every prompt token, and the greedy tokens that follow, found with a KV cache."""
    found: dict[str, np.ndarray] = {}
    for i, length in enumerate(PROMPTS):
        ids = torch.randint(0, vocab, (1, length))
        found[f"ids_{i}"] = ids[0].numpy()
        cache, greedy = DynamicCache(config=model.config), []
        with torch.no_grad():
            logits = model(ids, cache=cache, use_cache=True).logits
            found[f"logits_{i}"] = logits[0].float().numpy()
            while len(greedy) < GREEDY:
                greedy.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([[greedy[-1]]]), cache=cache, use_cache=True).logits
        found[f"greedy_{i}"] = np.array(greedy, np.int64)
    return found


def written(fixture: Fixture, config: dict[str, object]) -> dict[str, object]:
    """config.json as a publisher would have written it."""
    if fixture.older:
        parameters = dict(config.pop("rope_parameters"))  # type: ignore[call-overload]
        config["rope_theta"] = parameters.pop("rope_theta")
        if "partial_rotary_factor" in parameters:
            config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        parameters["type"] = parameters.pop("rope_type")
        config["rope_scaling"] = None if parameters["type"] == "default" else parameters
        config["torch_dtype"] = config.pop("dtype")
    if fixture.mxfp4:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    for key in fixture.drop:
        config.pop(key, None)
    for old, new in fixture.rename:
        if old in config:
            config[new] = config.pop(old)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", default=list(FIXTURES), help="all if none is given"
    )
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "models")
    arguments = parser.parse_args()
    for name in arguments.names:
        folder = arguments.into / name
        shutil.rmtree(folder, ignore_errors=True)
        make(name, folder)
        print(name, sum(file.stat().st_size for file in folder.iterdir()) // 1024, "KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
