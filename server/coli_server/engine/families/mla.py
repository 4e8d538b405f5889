"""What the families with latent attention share: DeepSeek-V2, DeepSeek-V3 and GLM-5."""

from __future__ import annotations

from collections.abc import Sequence

from coli_server.engine.config import Config
from coli_server.engine.families.common import layer_count, rms_norm, silu
from coli_server.engine.rope import read_rope, yarn_mscale
from coli_server.engine.spec import (
    DenseMlp,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoeMlp,
    RopeSpec,
    SharedExpert,
)

# How training balanced experts and split them over machines, and how many layers predict further tokens.
IRRELEVANT = frozenset(
    ["aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "num_nextn_predict_layers", "num_mtp_layers"]
)
# The layers behind the last one predict further tokens in training and speculation only; frequencies of
# rotary embeddings, which some old checkpoints hold, are computed.
IGNORED = (r"model\.layers\.{beyond}\..*", r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def refuse_quantization(config: Config) -> None:
    """Raise ConfigError for a checkpoint whose weights are not plain floating-point numbers."""
    if config.raw("quantization_config") is not None:
        raise config.error("quantization_config", "none (a checkpoint converted to bfloat16)")


def latent_attention(config: Config, *, interleaved: bool) -> LatentAttention:
    """Latent attention; `interleaved` is how the rotary pairs lie in the checkpoint."""
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.error("num_key_value_heads", f"num_attention_heads={heads}: every head has its own keys")
    nope, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim", low=2)
    if rotary % 2:
        raise config.error("qk_rope_head_dim", "an even number")
    # Both follow from the two parts; what `head_dim` stands for differs between publishers.
    if config.integer("qk_head_dim", nope + rotary) != nope + rotary:
        raise config.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {nope + rotary}")
    if config.integer("head_dim", rotary) not in (rotary, nope, nope + rotary):
        raise config.error("head_dim", f"{rotary}, {nope} or {nope + rotary}, as the qk_*_head_dim say")
    rope = read_rope(
        config, rotary, context_length=config.integer("max_position_embeddings"), interleaved=interleaved
    )
    if rope.dim != rotary:
        raise config.error("partial_rotary_factor", "1: qk_rope_head_dim says what is rotated")
    return LatentAttention(
        heads=heads,
        q_rank=config.optional_integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotary,
        value_dim=config.integer("v_head_dim"),
        rope=rope,
        scale=(nope + rotary) ** -0.5 * _temperature(rope) ** 2,
        bias=config.flag("attention_bias", False),
    )


def _temperature(rope: RopeSpec) -> float:
    """YaRN's factor on queries and keys, which `mscale_all_dim` moves from the angles to the scores."""
    mscale, factor = rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor")
    if not isinstance(mscale, float) or not isinstance(factor, float):
        return 1.0
    return yarn_mscale(factor, mscale)


def shared_experts(config: Config, width: int, *, bias: bool = False) -> SharedExpert | None:
    """`n_shared_experts` of `width` neurons side by side, as one; `bias`: its matrices have one."""
    count = config.integer("n_shared_experts", 0, low=0)
    return SharedExpert(width * count, bias=bias) if count else None


def first_dense_layers(config: Config, default: int) -> list[bool]:
    """Which layers are dense: the first `first_k_dense_replace`."""
    layers = layer_count(config)
    dense = config.integer("first_k_dense_replace", default, low=0, high=1 << 24)
    return [i < dense for i in range(layers)]


def decoder(
    config: Config,
    model_type: str,
    attention: LatentAttention | Sequence[LatentAttention],
    moe: MoeMlp,
    dense: Sequence[bool],
    *,
    norm_eps: float,
    mlp_bias: bool = False,
) -> ModelSpec:
    """The whole model; `dense[i]` says whether layer i is, `attention` may differ from layer to layer."""
    config.choice("moe_layer_freq", (1,), 1)
    activation = silu(config)
    dense_mlp = DenseMlp(config.integer("intermediate_size"), activation, mlp_bias)
    each = [attention] * len(dense) if isinstance(attention, LatentAttention) else attention
    return ModelSpec(
        model_type=model_type,
        hidden=config.integer("hidden_size"),
        vocab=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
        layers=tuple(
            LayerSpec(a, dense_mlp if is_dense else moe) for a, is_dense in zip(each, dense, strict=True)
        ),
        norm=rms_norm(config, norm_eps),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )
