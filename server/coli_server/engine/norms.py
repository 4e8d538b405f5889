"""Normalisation of hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.spec import NormSpec
from coli_server.engine.weights import Weights

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm where there is a bias; weights are float32 [size]."""

    weight: F32
    bias: F32 | None
    eps: float

    @classmethod
    def load(cls, weights: Weights, name: str, size: int, spec: NormSpec) -> Norm:
        """The norm whose hub name, without `.weight`, is `name`."""
        bias = weights.vector(f"{name}.bias", size) if spec.kind == "layer" else None
        return cls(weights.vector(f"{name}.weight", size), bias, spec.eps)

    def __call__(self, x: F32) -> F32:
        """Normalised rows: float32 [rows, size]."""
        if self.bias is None:
            return kernels.rms_norm(x, self.weight, self.eps)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def behind(self, x: F32, y: F32, multiplier: np.float32) -> F32:
        """`x += y * multiplier`, in place, and the normalised rows of that."""
        if self.bias is None:
            return kernels.add_rms_norm(x, y, multiplier, self.weight, self.eps)
        x += y * multiplier
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)
