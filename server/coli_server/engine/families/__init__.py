"""The supported model families, one module each, found by the `model_type` of config.json."""

from __future__ import annotations

from importlib import import_module

from coli_server.engine.config import Config
from coli_server.engine.families.common import Family

MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)


def family_of(config: Config) -> Family:
    """The family that `config` belongs to. Raises ConfigError, which names the supported ones."""
    model_type = config.raw("model_type")
    if model_type not in MODEL_TYPES:
        raise config.error("model_type", ", ".join(MODEL_TYPES))
    family = import_module(f"coli_server.engine.families.{model_type}").FAMILY
    assert isinstance(family, Family)
    return family
