"""Where the routed experts of a layer lie in a checkpoint, and how the kernels find them in a slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coli_server.engine.families.common import FusedExperts, PackedExperts, SeparateExperts, TensorNames
from coli_server.engine.kernels import (
    ACTIVATION_CLAMPED_SWIGLU,
    ACTIVATION_SILU,
    ITEM_BYTES,
    ExpertShape,
    Kind,
)
from coli_server.engine.packed_experts import packed_layer, packed_shape
from coli_server.engine.spec import Activation, ModelSpec, MoeMlp
from coli_server.engine.stored_form import ExpertImage, image_name
from coli_server.engine.weights import KINDS, Weights
from coli_server.errors import ModelError
from coli_server.experts import ExpertLayout, ExpertSource, LayerExperts, TensorSlice


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of one MoE layer: their bytes for the cache, and the meaning of a slot for the kernels."""

    files: LayerExperts
    shape: ExpertShape


def routed_experts(weights: Weights, names: TensorNames, spec: ModelSpec, layer: int) -> RoutedExperts:
    """Find the routed experts of `layer`. Raises CheckpointError for a missing or misshapen tensor."""
    found = _stored_experts(weights, names, spec, layer)
    return replace(found, shape=replace(found.shape, kind=weights.multiplied(Kind(found.shape.kind))))


def _stored_experts(weights: Weights, names: TensorNames, spec: ModelSpec, layer: int) -> RoutedExperts:
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, MoeMlp)
    if weights.form is not None:
        return _images(weights, weights.form.experts, spec, mlp, layer, names.layer.format(layer=layer))
    if isinstance(names.experts, PackedExperts):
        return _packed(weights, names.experts, spec, mlp, layer, names.layer.format(layer=layer))
    pieces = _fused if isinstance(names.experts, FusedExperts) else _separate
    parts, dtypes = pieces(weights, names, spec, mlp, names.layer.format(layer=layer))
    if len(dtypes) != 1:
        raise ModelError(
            f"{weights.index.folder}: the experts of layer {layer} are stored in several types "
            f"({', '.join(sorted(dtypes))}); one type for all is needed"
        )
    kind = KINDS[dtypes.pop()]
    layout = ExpertLayout.plain({name: piece.nbytes for name, piece in parts[0].items()})
    starts = {name: part.offset for name, part in layout.parts.items()}
    if "gate_up" in starts:
        starts["gate"] = starts["gate_up"]
        starts["up"] = starts["gate_up"] + mlp.width * spec.hidden * ITEM_BYTES[kind]
    return RoutedExperts(
        LayerExperts(layer, layout, tuple(ExpertSource(part) for part in parts)),
        expert_shape(
            kind, spec.hidden, mlp.width, mlp.activation, (starts["gate"], starts["up"], starts["down"])
        ),
    )


Pieces = list[dict[str, TensorSlice]]  # of every expert, by name


def _separate(
    weights: Weights, names: TensorNames, spec: ModelSpec, mlp: MoeMlp, prefix: str
) -> tuple[Pieces, set[str]]:
    """Experts with tensors of their own, and the types in which these are stored."""
    assert isinstance(names.experts, SeparateExperts)
    up, down = (mlp.width, spec.hidden), (spec.hidden, mlp.width)
    patterns = {"gate": names.experts.gate, "up": names.experts.up, "down": names.experts.down}
    shapes = {"gate": up, "up": up, "down": down}
    parts: Pieces = []
    dtypes: set[str] = set()
    for expert in range(mlp.experts):
        infos = {
            part: weights.info(prefix + pattern.format(expert=expert), *shapes[part])
            for part, pattern in patterns.items()
        }
        dtypes |= {info.dtype for info in infos.values()}
        parts.append({part: info.whole() for part, info in infos.items()})
    return parts, dtypes


def _fused(
    weights: Weights, names: TensorNames, spec: ModelSpec, mlp: MoeMlp, prefix: str
) -> tuple[Pieces, set[str]]:
    """Experts that are rows of two tensors, and the types in which these are stored."""
    assert isinstance(names.experts, FusedExperts)
    gate_up = weights.info(prefix + names.experts.gate_up, mlp.experts, 2 * mlp.width, spec.hidden)
    down = weights.info(prefix + names.experts.down, mlp.experts, spec.hidden, mlp.width)
    parts = [{"gate_up": gate_up.row(expert), "down": down.row(expert)} for expert in range(mlp.experts)]
    return parts, {gate_up.dtype, down.dtype}


def _packed(
    weights: Weights, names: PackedExperts, spec: ModelSpec, mlp: MoeMlp, layer: int, prefix: str
) -> RoutedExperts:
    """Experts that are unpacked as they are read."""
    packed = packed_layer(
        weights, prefix + names.gate_up, prefix + names.down, mlp.experts, spec.hidden, mlp.width,
        mxfp4=mlp.mxfp4,
    )  # fmt: skip
    activation = mlp.activation
    shape = packed_shape(
        packed, spec.hidden, mlp.width, ACTIVATIONS[activation.kind], activation.alpha, activation.limit
    )
    return RoutedExperts(LayerExperts(layer, packed.layout, packed.sources), shape)


def _images(
    weights: Weights, kind: Kind, spec: ModelSpec, mlp: MoeMlp, layer: int, prefix: str
) -> RoutedExperts:
    """Experts that lie in a converted folder as they will in their slots."""
    image = ExpertImage.of(kind, spec.hidden, mlp.width, biased=mlp.expert_bias)
    weights.kinds.add(kind)
    sources = tuple(
        ExpertSource({"image": weights.codes(image_name(prefix, expert), image.nbytes).whole()})
        for expert in range(mlp.experts)
    )
    shape = expert_shape(kind, spec.hidden, mlp.width, mlp.activation, (image.gate, image.up, image.down))
    shape = replace(shape, gate_bias=image.gate_bias, up_bias=image.up_bias, down_bias=image.down_bias)
    return RoutedExperts(LayerExperts(layer, ExpertLayout.plain({"image": image.nbytes}), sources), shape)


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
