"""What a user may choose about the expert store of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coli_server.experts import (
    DEFAULT_READERS,
    DirectReader,
    LayerExperts,
    MirrorReader,
    PreadReader,
    Reader,
    check_mirror,
    direct_buffer_bytes,
    staging_bytes,
)
from coli_server.ranges import Activations
from coli_server.routing import RoutePolicy


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How experts come into memory and stay there.

    pilot    guess the experts of the next layer and read them ahead
    readers  experts that are read at the same time
    direct   read past the page cache, where the file system can
    mirror   a folder, on another disk, with copies of the weight files: it shares the reads
    evict    which expert a full layer gives up: `lru`, `lfu` or `learned`
    trace    the file in which routing is recorded; None: nowhere
    history  the folder where the use of experts is remembered from run to run; None: nowhere
    pin      `auto`: keep what this model has used most, as far as `history` knows; `off`; or the file of a
             usage history, which must be this model's
    pin_ram  bytes of the expert cache that pins may take; None: half of what is beyond K experts a layer
    """

    pilot: bool = False
    readers: int = DEFAULT_READERS
    direct: bool = False
    mirror: Path | None = None
    evict: str = "lru"
    trace: Path | None = None
    history: Path | None = None
    pin: str = "off"
    pin_ram: int | None = None


DEFAULT_STORE = StoreOptions()


def describe_mode(policy: RoutePolicy, *, pilot: bool, activations: Activations = "float32") -> str:
    """In one word without blanks what is on that changes speed or output: `stock,pilot`, ..."""
    rounded = "" if activations == "float32" else f",{activations}-activations"
    return policy.describe() + (",pilot" if pilot else "") + rounded


def reading_bytes(store: StoreOptions, layers: Sequence[LayerExperts]) -> int:
    """Memory that reading experts of `layers` needs beside their slots."""
    buffers = store.readers * _buffer_bytes(layers) if store.direct else 0
    return buffers + staging_bytes(layers, store.readers)


def make_reader(store: StoreOptions, layers: Sequence[LayerExperts], inner: Reader | None = None) -> Reader:
    """What reads experts of `layers` as `store` says; `inner` takes the place of reading from the disk.

    Raises ConfigurationError for a mirror that is no copy.
    """
    if store.mirror is not None:
        files = {
            piece.file for layer in layers for source in layer.sources for piece in source.parts.values()
        }
        check_mirror(files, store.mirror)
    if inner is None:
        inner = DirectReader(_buffer_bytes(layers)) if store.direct else PreadReader()
    return inner if store.mirror is None else MirrorReader(inner, files, store.mirror)


def _buffer_bytes(layers: Sequence[LayerExperts]) -> int:
    return direct_buffer_bytes(max(layer.expert_bytes() for layer in layers))
