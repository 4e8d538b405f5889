"""The forward pass: model families, attention, KV cache, kernels, sampling, text."""

from coli_server.engine.engine import Engine

__all__ = ["Engine"]
