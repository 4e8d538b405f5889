"""The cache reads exactly one expert's bytes from every layout, and the right ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine.model import Checkpoint
from coli_server.experts import PreadReader

MODELS = Path(__file__).parents[1] / "data" / "models"
FOLDERS = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


class CountingReader(PreadReader):
    """Counts the bytes that are read from every place of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[str, int, int]] = Counter()

    def preadv(self, file: Path, buffers, offset: int) -> int:  # type: ignore[no-untyped-def]
        count = super().preadv(file, buffers, offset)
        self.reads[file.name, offset, count] += 1
        return count


@pytest.mark.parametrize("name", FOLDERS)
def test_a_load_reads_one_experts_bytes_and_no_other(name: str) -> None:
    checkpoint = Checkpoint.open(MODELS / name)
    files = checkpoint.experts[-1].files
    reader = CountingReader()
    engine = Engine.open(MODELS / name, warm=False, experts_per_layer=checkpoint.spec.moe.k, reader=reader)
    for expert, source in enumerate(files.sources):
        reader.reads.clear()
        with engine.cache.stream(files.layer, np.array([expert], np.int32)) as stream:
            leases = list(stream)
        assert sum(len(lease.experts) for lease in leases) == 1
        read = {(file, at) for file, offset, count in reader.reads for at in range(offset, offset + count)}
        wanted = {
            (piece.file.name, at)
            for piece in source.parts.values()
            for at in range(piece.offset, piece.offset + piece.nbytes)
        }
        assert read == wanted
        assert engine.cache.counters.load_bytes == (expert + 1) * files.expert_bytes()
    engine.close()


@pytest.mark.parametrize("name", ["granitemoe", "granitemoe-bias"])
def test_fused_experts_are_rows_of_two_tensors(name: str) -> None:
    checkpoint = Checkpoint.open(MODELS / name)
    index, spec = checkpoint.weights.index, checkpoint.spec
    gate_up = index["model.layers.0.block_sparse_moe.input_linear.weight"]
    down = index["model.layers.0.block_sparse_moe.output_linear.weight"]
    for expert, source in enumerate(checkpoint.experts[0].files.sources):
        assert source.parts["gate_up"] == gate_up.row(expert)
        assert source.parts["down"] == down.row(expert)
    assert checkpoint.experts[0].files.expert_bytes() * spec.moe.experts == gate_up.nbytes + down.nbytes
