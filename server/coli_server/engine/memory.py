"""Dividing the memory budget: dense weights, KV cache, activations, and the rest for experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from coli_server.engine.code_memory import code_bytes
from coli_server.engine.kv import kv_bytes_per_token, kv_widths
from coli_server.engine.model import Checkpoint
from coli_server.engine.sparse import SCORES_AT_ONCE
from coli_server.engine.spec import Attention, GroupedQueryAttention, LatentAttention, ModelSpec
from coli_server.engine.store import DEFAULT_STORE, StoreOptions, reading_bytes
from coli_server.errors import ConfigurationError
from coli_server.experts import available_memory, plan, resident_bytes

KV_SHARE = 4  # the KV cache gets a quarter of the budget at most
FULL_CONTEXTS = 4  # and never more than this many sequences of full length
LEAST_CONTEXT = 256  # tokens; a server that cannot hold these is of no use
AVAILABLE_SHARE = 0.8  # of the memory that is free at the start: what a process takes without being told
MARGIN_BYTES = 8 << 20  # by how much the resident set of a process without a model differs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets what, in bytes. All sequences share `kv_bytes`; none has over `context_length` tokens."""

    ram: int
    dense_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    activation_bytes: int
    context_length: int
    slots_per_layer: int
    cache_bytes: int


def default_ram() -> int:
    """The budget of a process that was given none, in bytes. Raises ConfigurationError."""
    return int(AVAILABLE_SHARE * available_memory())


def plan_memory(
    checkpoint: Checkpoint,
    ram: int,
    experts_per_layer: int | None,
    context: int | None,
    chunk: int,
    kv_ram: int | None = None,
    *,
    store: StoreOptions = DEFAULT_STORE,
) -> MemoryPlan:
    """Divide `ram` bytes. `context` is the longest sequence that the user asks for; `chunk` a step's rows;
    `kv_ram` the bytes for KV caches, in place of a share of `ram`.

    Raises ConfigurationError with the smallest budget that works.
    """
    spec = checkpoint.spec
    token = kv_bytes_per_token([kv_widths(layer.attention) for layer in spec.layers])
    if context is not None and context > spec.context_length:
        raise ConfigurationError(
            f"--context={context} is longer than the model's own limit (accepted: 1 to {spec.context_length})"
        )
    longest = context or spec.context_length
    least = (context or min(longest, LEAST_CONTEXT)) * token
    if kv_ram is not None and kv_ram < least:
        raise ConfigurationError(f"--kv-ram={kv_ram} is too small: one request needs at least {least} bytes")
    layers = [experts.files for experts in checkpoint.experts]
    dense, activations = checkpoint.dense_bytes, activation_bytes(spec, chunk)
    price = partial(
        plan,
        ram,
        dense_bytes=dense,
        activation_bytes=activations,
        staging_bytes=reading_bytes(store, layers),
        slot_bytes=[layer.layout.slot_bytes for layer in layers],
        experts=[layer.experts for layer in layers],
        k=spec.moe.k,
        margin_bytes=MARGIN_BYTES,
        runtime_bytes=resident_bytes() + code_bytes(spec, checkpoint.weights.kinds),
    )
    fewest = spec.moe.k if experts_per_layer is None else min(experts_per_layer, spec.moe.k)
    smallest = price(kv_bytes=kv_ram or least, experts_per_layer=fewest)
    kv = kv_ram
    if kv is None:
        wanted = max(least, min(ram // KV_SHARE, FULL_CONTEXTS * longest * token))
        # A short budget is halved between more context and more experts: neither alone is of much use.
        kv = least + min(wanted - least, (ram - smallest.total_bytes) // 2)
    found = price(kv_bytes=kv, experts_per_layer=experts_per_layer)
    return MemoryPlan(
        ram,
        dense,
        kv,
        token,
        activations,
        min(longest, kv // token),
        found.slots_per_layer,
        found.cache_bytes,
    )


def activation_bytes(spec: ModelSpec, rows: int) -> int:
    """An upper estimate of the scratch memory of one step of `rows` tokens."""
    widest = 0
    for layer in spec.layers:
        width = getattr(layer.mlp, "width", 0)
        widest = max(widest, width)
    moe = spec.moe
    shared = moe.shared.width if moe.shared else 0
    floats = 8 * spec.hidden + moe.k * (spec.hidden + moe.width) + max(widest, shared)
    attention = max(_attention_floats(layer.attention) for layer in spec.layers)
    sparse = any(
        isinstance(layer.attention, LatentAttention) and layer.attention.indexer for layer in spec.layers
    )
    return 4 * (rows * (floats + attention) + 64 * spec.vocab + (SCORES_AT_ONCE if sparse else 0))


def _attention_floats(attention: Attention) -> int:
    """Scratch floats of a row: queries, outputs, and their copies by head."""
    if isinstance(attention, GroupedQueryAttention):
        return 4 * attention.heads * attention.head_dim
    indexer = attention.indexer
    selected = 0 if indexer is None else indexer.topk + indexer.heads * indexer.head_dim
    narrow = attention.nope_dim + attention.rope_dim + attention.value_dim
    return attention.heads * (4 * attention.kv_rank + 2 * narrow) + selected
