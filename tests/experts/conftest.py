"""Small checkpoints on disk and caches over them, shared by the tests of the expert store."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from coli_server.experts import (
    CheckpointIndex,
    ExpertCache,
    ExpertLayout,
    ExpertSource,
    LayerExperts,
)
from support.faults import FaultReader

Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


def write_shard(file: Path, tensors: Tensors) -> Path:
    """A safetensors file with the tensors (dtype, shape, bytes) one behind the other."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))
    return file


@dataclass
class Store:
    """Two MoE layers (numbers 1 and 3) of `experts` experts in three shards, and what their bytes are.

    Gate and up of an expert lie side by side, its down projection in another shard.
    """

    folder: Path
    index: CheckpointIndex
    layers: list[LayerExperts]

    def expected(self, layer: int, expert: int) -> dict[str, bytes]:
        return {
            part: self.index.read(f"layers.{layer}.experts.{expert}.{part}").tobytes()
            for part in ("gate", "up", "down")
        }

    def held(self, layer: int, address: int) -> dict[str, bytes]:
        """What a slot at this address holds."""
        layout = next(experts.layout for experts in self.layers if experts.layer == layer)
        return {
            name: ctypes.string_at(address + part.offset, part.nbytes) for name, part in layout.parts.items()
        }

    def place(self, layer: int, expert: int) -> tuple[str, int]:
        """A file and a byte of it that only reads of this expert cover."""
        tensor = self.index[f"layers.{layer}.experts.{expert}.gate"]
        return tensor.file.name, tensor.offset


def make_store(folder: Path, experts: int = 8) -> Store:
    random = np.random.default_rng(7)
    shards: dict[str, dict[str, tuple[str, Sequence[int], bytes]]] = {}
    for layer in (1, 3):
        for expert in range(experts):
            for part, shape in (("gate", (6, 10)), ("up", (6, 10)), ("down", (10, 6))):
                shard = "down.safetensors" if part == "down" else f"layer{layer}.safetensors"
                values = random.integers(0, 1 << 16, shape, np.uint16)
                shards.setdefault(shard, {})[f"layers.{layer}.experts.{expert}.{part}"] = (
                    "BF16",
                    shape,
                    values.tobytes(),
                )
    for name, tensors in shards.items():
        write_shard(folder / name, tensors)
    index = CheckpointIndex.open(folder)
    layers = []
    for layer in (1, 3):
        sources = [
            ExpertSource(
                {
                    part: index[f"layers.{layer}.experts.{expert}.{part}"].whole()
                    for part in ("gate", "up", "down")
                }
            )
            for expert in range(experts)
        ]
        layout = ExpertLayout.plain({name: piece.nbytes for name, piece in sources[0].parts.items()})
        layers.append(LayerExperts(layer, layout, sources))
    return Store(folder, index, layers)


@pytest.fixture
def shard_writer() -> Callable[[Path, Tensors], Path]:
    return write_shard


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


@pytest.fixture
def reader() -> FaultReader:
    return FaultReader()


@pytest.fixture
def make_cache(store, reader):
    """Builds caches over `store` that read through `reader`; closes them after the test."""
    caches = []

    def build(slots: int, **options) -> ExpertCache:
        caches.append(ExpertCache(store.layers, slots, reader=reader, **options))
        return caches[-1]

    yield build
    reader.gate.set()
    for cache in caches:
        cache.close()
