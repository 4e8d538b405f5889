"""What a model folder holds and what it would need, from its configuration and headers alone."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coli_server.engine.engine import PREFILL_CHUNK
from coli_server.engine.kv import kv_bytes_per_token, kv_widths
from coli_server.engine.memory import plan_memory
from coli_server.engine.model import Checkpoint
from coli_server.engine.spec import Attention, LatentAttention
from coli_server.errors import ConfigurationError
from coli_server.experts import parse_size

RAMS = ("1G", "2G", "4G", "8G", "16G", "32G", "64G")
HITS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a `--ram` would hold. With `problem` it is too small, and the figures are 0."""

    ram: str
    slots_per_layer: int = 0
    share: float = 0.0  # of all routed experts
    context_length: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ReadEstimate:
    """Bytes read from files for one generated token, when `hit` of all lookups find their expert."""

    hit: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model folder in figures. Bytes are of the files; `kv_token_bytes` and the budgets are of memory.

    `active_parameters` take part in one token: everything but the experts that were not chosen.
    `kv_token_bytes_expanded` is what a token would need if latent attention cached keys and values.
    """

    folder: str
    family: str
    parameters: int
    active_parameters: int
    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    expert_bytes: int
    experts_bytes: int
    dense_bytes: int
    context_length: int
    kv_token_bytes: int
    kv_token_bytes_expanded: int
    shards: int
    budgets: tuple[Budget, ...]
    reads: tuple[ReadEstimate, ...]


def inspect_folder(folder: Path, rams: Sequence[str] = RAMS, hits: Sequence[float] = HITS) -> Inspection:
    """Describe the Hugging Face folder `folder`; reads configuration and headers, and no weights.

    Raises ModelError for a folder that is broken or not understood, ConfigurationError for a bad size.
    """
    checkpoint = Checkpoint.open(folder)
    spec, moe = checkpoint.spec, checkpoint.spec.moe
    files = [experts.files for experts in checkpoint.experts]
    dense, routed = _parameters(checkpoint)
    a_token = sum(layer.expert_bytes() for layer in files) * moe.k
    return Inspection(
        folder=str(folder),
        family=spec.model_type,
        parameters=dense + routed,
        active_parameters=dense + routed // moe.experts * moe.k,
        layers=len(spec.layers),
        moe_layers=len(files),
        experts=moe.experts,
        experts_per_token=moe.k,
        expert_bytes=max(layer.expert_bytes() for layer in files),
        experts_bytes=sum(layer.experts * layer.expert_bytes() for layer in files),
        dense_bytes=checkpoint.dense_bytes,
        context_length=spec.context_length,
        kv_token_bytes=kv_bytes_per_token([kv_widths(layer.attention) for layer in spec.layers]),
        kv_token_bytes_expanded=4 * sum(_expanded(layer.attention) for layer in spec.layers),
        shards=len({tensor.file for tensor in checkpoint.weights.index.values()}),
        budgets=tuple(_budget(checkpoint, ram) for ram in rams),
        reads=tuple(ReadEstimate(hit, round(a_token * (1 - hit))) for hit in hits),
    )


def _parameters(checkpoint: Checkpoint) -> tuple[int, int]:
    """Parameters of the resident part and of all routed experts together."""
    spec, moe = checkpoint.spec, checkpoint.spec.moe
    expert = 3 * spec.hidden * moe.width + (2 * moe.width + spec.hidden if moe.expert_bias else 0)
    starts: dict[Path, list[int]] = {}
    for layer in checkpoint.experts:
        for source in layer.files.sources:
            for piece in source.parts.values():
                starts.setdefault(piece.file, []).append(piece.offset)
    for offsets in starts.values():
        offsets.sort()
    dense = 0
    for tensor in checkpoint.needed:
        offsets = starts.get(tensor.file, [])
        first = bisect_left(offsets, tensor.offset)
        if first == len(offsets) or offsets[first] >= tensor.offset + tensor.nbytes:
            dense += math.prod(tensor.shape)
    return dense, expert * moe.experts * len(checkpoint.experts)


def _expanded(attention: Attention) -> int:
    """Floats a token if every head's key and value were cached."""
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
    return kv_widths(attention).floats


def _budget(checkpoint: Checkpoint, ram: str) -> Budget:
    size = parse_size(ram)
    try:
        plan = plan_memory(checkpoint, size, None, None, PREFILL_CHUNK)
    except ConfigurationError as error:
        least = re.search(r"--ram=\d+M(?= \()", str(error))
        return Budget(ram, problem=f"too small: the least is {least[0]}" if least else str(error))
    return Budget(
        ram, plan.slots_per_layer, plan.slots_per_layer / checkpoint.spec.moe.experts, plan.context_length
    )
