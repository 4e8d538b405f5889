"""Where the routed experts of a layer lie in a checkpoint, and how the kernels find them in a slot."""

from __future__ import annotations

from dataclasses import dataclass

from coli_server.engine.families.common import TensorNames
from coli_server.engine.kernels import (
    ACTIVATION_CLAMPED_SWIGLU,
    ACTIVATION_SILU,
    ITEM_BYTES,
    ExpertShape,
    Kind,
)
from coli_server.engine.spec import Activation, ModelSpec, MoeMlp
from coli_server.engine.weights import KINDS, Weights
from coli_server.errors import ModelError
from coli_server.experts import ExpertLayout, ExpertSource, LayerExperts


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of one MoE layer: their bytes for the cache, and the meaning of a slot for the kernels."""

    files: LayerExperts
    shape: ExpertShape


def routed_experts(weights: Weights, names: TensorNames, spec: ModelSpec, layer: int) -> RoutedExperts:
    """Find the routed experts of `layer`. Raises CheckpointError for a missing or misshapen tensor."""
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MoeMlp)
    prefix = names.layer.format(layer=layer)
    up, down = (mlp.width, spec.hidden), (spec.hidden, mlp.width)
    patterns = {"gate": names.experts.gate, "up": names.experts.up, "down": names.experts.down}
    shapes = {"gate": up, "up": up, "down": down}
    sources, dtypes = [], set()
    for expert in range(mlp.experts):
        infos = {
            part: weights.info(prefix + pattern.format(expert=expert), *shapes[part])
            for part, pattern in patterns.items()
        }
        dtypes |= {info.dtype for info in infos.values()}
        sources.append(ExpertSource({part: info.whole() for part, info in infos.items()}))
    if len(dtypes) != 1:
        raise ModelError(
            f"{weights.index.folder}: the experts of layer {layer} are stored in several types "
            f"({', '.join(sorted(dtypes))}); one type for all is needed"
        )
    kind = KINDS[dtypes.pop()]
    nbytes = mlp.width * spec.hidden * ITEM_BYTES[kind]
    layout = ExpertLayout.plain({"gate": nbytes, "up": nbytes, "down": nbytes})
    offsets = tuple(layout.parts[part].offset for part in ("gate", "up", "down"))
    return RoutedExperts(
        LayerExperts(layer, layout, tuple(sources)),
        expert_shape(kind, spec.hidden, mlp.width, mlp.activation, (offsets[0], offsets[1], offsets[2])),
    )


def expert_shape(
    kind: Kind, hidden: int, width: int, activation: Activation, offsets: tuple[int, int, int]
) -> ExpertShape:
    """A block of three row-major matrices, gate, up and down, that begin at byte `offsets` of its memory."""
    gate, up, down = offsets
    return ExpertShape(
        kind=kind,
        d=hidden,
        f=width,
        gate_offset=gate,
        up_offset=up,
        down_offset=down,
        activation=ACTIVATIONS[activation.kind],
        alpha=activation.alpha,
        limit=activation.limit,
    )


ACTIVATIONS = {"silu": ACTIVATION_SILU, "clamped": ACTIVATION_CLAMPED_SWIGLU}
