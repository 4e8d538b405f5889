"""Which layers have routed experts in the Qwen families."""

from __future__ import annotations

from coli_server.engine.config import Config


def dense_layers(config: Config, layers: int) -> frozenset[int]:
    """The layers without routed experts: those of `mlp_only_layers`, and all but every
    `decoder_sparse_step`-th."""
    step = config.integer("decoder_sparse_step", 1)
    listed = config.integers("mlp_only_layers")
    if any(i >= layers for i in listed):
        raise config.error("mlp_only_layers", f"layers from 0 to {layers - 1}")
    return frozenset(listed) | {i for i in range(layers) if (i + 1) % step}
