"""Experts whose stored form the kernels cannot read: gpt-oss's, input-major or in MXFP4.

All experts of a layer share a few tensors. The rows of gate and up alternate, and there are biases. A slot
holds gate_up [2 * width, hidden] and down [hidden, width], row-major, and the biases in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli_server.engine import kernels
from coli_server.engine.kernels import ITEM_BYTES, Kind
from coli_server.engine.kernels.unpack import MXFP4_BLOCK, transpose, unpack_mxfp4
from coli_server.engine.weights import KINDS, Weights, to_float32
from coli_server.errors import ModelError
from coli_server.experts import ExpertLayout, ExpertSource, TensorInfo

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's experts: where they lie in files, how a slot is made of them, and its weights' type."""

    layout: ExpertLayout
    sources: tuple[ExpertSource, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class Unpack:
    """Makes a slot's parts of one expert's stored pieces. Runs on a read thread.

    `stored` is the type of the weights, None for MXFP4; `biases` those of the gate_up and down biases.
    """

    hidden: int
    width: int
    stored: Kind | None
    biases: tuple[Kind, Kind]

    def __call__(self, stored: Mapping[str, Bytes], slot: Mapping[str, Bytes]) -> None:
        for name, inputs in (("gate_up", self.hidden), ("down", self.width)):
            if self.stored is None:
                unpack_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"], slot[name].view(np.uint16))
            else:
                item = np.uint16 if ITEM_BYTES[self.stored] == 2 else np.uint32
                source = stored[f"{name}_stored"].view(item).reshape(inputs, -1)
                transpose(source, slot[name].view(item).reshape(-1, inputs))
        for name, kind in zip(("gate_up_bias", "down_bias"), self.biases, strict=True):
            values = stored[f"{name}_stored"]
            slot[name].view(np.float32)[:] = (
                values.view(np.float32) if kind == Kind.F32 else to_float32(values.view(np.uint16), kind)
            )


def packed_layer(
    weights: Weights, gate_up: str, down: str, experts: int, hidden: int, width: int, *, mxfp4: bool
) -> PackedLayer:
    """Find the experts whose tensors have the names `gate_up` and `down`, and `_bias` behind them.

    Plain: [experts, hidden, 2 * width] and [experts, width, hidden]. MXFP4: `_blocks` and `_scales` behind
    the names, [experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32], of bytes. Raises
    CheckpointError or ModelError.
    """
    tensors: dict[str, TensorInfo] = {}
    for part, name, outputs, inputs in (
        ("gate_up", gate_up, 2 * width, hidden),
        ("down", down, hidden, width),
    ):
        if mxfp4:
            groups = inputs // MXFP4_BLOCK
            tensors[f"{part}_blocks"] = weights.codes(f"{name}_blocks", experts, outputs, groups, 16)
            tensors[f"{part}_scales"] = weights.codes(f"{name}_scales", experts, outputs, groups)
        else:
            tensors[f"{part}_stored"] = weights.info(name, experts, inputs, outputs)
        tensors[f"{part}_bias_stored"] = weights.info(f"{name}_bias", experts, outputs)
    stored = None if mxfp4 else _one_kind(tensors["gate_up_stored"], tensors["down_stored"])
    kind = Kind.BF16 if stored is None else stored
    weights.kinds.add(kind)
    biases = (KINDS[tensors["gate_up_bias_stored"].dtype], KINDS[tensors["down_bias_stored"].dtype])
    slot = {
        "gate_up": 2 * width * hidden * ITEM_BYTES[kind],
        "down": hidden * width * ITEM_BYTES[kind],
        "gate_up_bias": 4 * 2 * width,
        "down_bias": 4 * hidden,
    }
    sources = tuple(
        ExpertSource({name: info.row(expert) for name, info in tensors.items()}) for expert in range(experts)
    )
    sizes = {name: piece.nbytes for name, piece in sources[0].parts.items()}
    layout = ExpertLayout.transformed(sizes, slot, Unpack(hidden, width, stored, biases))
    return PackedLayer(layout, sources, kind)


def _one_kind(gate_up: TensorInfo, down: TensorInfo) -> Kind:
    if gate_up.dtype != down.dtype:
        raise ModelError(
            f"{down.file}: tensor {down.name!r} has dtype {down.dtype}, but {gate_up.name!r} "
            f"{gate_up.dtype}; experts need one type"
        )
    return KINDS[gate_up.dtype]


def packed_shape(
    packed: PackedLayer, hidden: int, width: int, activation: int, alpha: float, limit: float
) -> kernels.ExpertShape:
    """How the kernels find the parts of a slot: every second row of gate_up is the gate's."""
    parts, row = packed.layout.parts, hidden * ITEM_BYTES[packed.kind]
    return kernels.ExpertShape(
        kind=packed.kind,
        d=hidden,
        f=width,
        gate_offset=parts["gate_up"].offset,
        up_offset=parts["gate_up"].offset + row,
        down_offset=parts["down"].offset,
        gate_stride=2 * row,
        up_stride=2 * row,
        gate_bias=parts["gate_up_bias"].offset,
        up_bias=parts["gate_up_bias"].offset + 4,
        down_bias=parts["down_bias"].offset,
        gate_bias_stride=2,
        up_bias_stride=2,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
