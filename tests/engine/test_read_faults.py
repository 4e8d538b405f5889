"""Experts that cannot be read: who fails, what the message says, and that everything else goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine.api import Failed, Finished
from coli_server.engine.service import SYSTEM
from coli_server.experts import CheckpointIndex
from coli_server.telemetry.counters import Counters
from support.faults import FaultReader
from support.served import TINY, Served

Serve = Callable[..., Served]
LONG = np.load(TINY / "expected.npz")["ids_2"].tolist()
SHORT = LONG[:1]
LAYERS, EXPERTS, K = (1, 2), 16, 4


def part(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"


def experts_read(reader: FaultReader, layer: int) -> set[int]:
    """The experts of `layer` among the reads so far."""
    index = CheckpointIndex.open(TINY)
    begins = [index[part(layer, expert)].offset for expert in range(EXPERTS)]
    return {
        expert
        for expert, begin in enumerate(begins)
        if any(offset <= begin < offset + size for _, offset, size in reader.log)
    }


@pytest.fixture
def reader() -> FaultReader:
    return FaultReader()


def only_long_wants(serve: Serve, layer: int) -> int:
    """An expert that the long prompt needs and the short one never does."""
    seen = []
    for prompt in (SHORT, LONG):
        reader = FaultReader()
        serve(reader=reader).run(prompt, 2)
        seen.append(experts_read(reader, layer))
    return min(seen[1] - seen[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_only_the_request_that_needs_the_expert_fails(serve: Serve, reader: FaultReader, layer: int) -> None:
    broken = only_long_wants(serve, layer)
    place = CheckpointIndex.open(TINY)[part(layer, broken)]
    served = serve(reader=reader, experts_per_layer=K)
    alone = served.run(SHORT, 2)[1]
    reader.fail[(place.file.name, place.offset)] = OSError(errno.EIO, "Input/output error")
    reader.gate.clear()  # nothing moves until both are there, so that they share steps
    keys = [served.submit(SHORT, 2, session="well"), served.submit(LONG, 2, session="ill")]
    reader.gate.set()
    failed = served.wait(keys[1])
    assert isinstance(failed, Failed)
    assert failed.code == "MODEL"
    assert f"layer {layer}, expert {broken}: cannot read {place.file}" in failed.message
    assert served.finish(keys[0])[1] == alone
    reader.fail.clear()
    assert isinstance(served.run(LONG, 2)[0], Finished)
    assert served.service.snapshot().load_errors > 0


def test_reads_of_a_failed_step_are_attributed(serve: Serve, reader: FaultReader) -> None:
    """Counters were added only for steps that ended well: global loads fell behind the cache's own."""
    place = CheckpointIndex.open(TINY)[part(2, only_long_wants(serve, 2))]
    served = serve(reader=reader, experts_per_layer=K)
    reader.fail[(place.file.name, place.offset)] = OSError(errno.EIO, "Input/output error")
    assert isinstance(served.wait(served.submit(LONG, 2, session="ill")), Failed)
    snapshot = served.service.snapshot()
    counters = served.engine.cache.counters
    total = sum(snapshot.sessions.values(), Counters()) + snapshot.closed
    assert (total.loads, total.load_bytes) == (counters.loads, counters.load_bytes)
    assert snapshot.sessions["ill"].loads > 0
    assert snapshot.sessions[SYSTEM].loads == 0


def test_no_slot_is_lost_by_failed_reads(serve: Serve, reader: FaultReader) -> None:
    place = CheckpointIndex.open(TINY)[part(1, only_long_wants(serve, 1))]
    served = serve(reader=reader, experts_per_layer=K)
    for _ in range(3 * K):
        reader.fail[(place.file.name, place.offset)] = OSError(errno.EIO, "Input/output error")
        assert isinstance(served.wait(served.submit(LONG, 2)), Failed)
    reader.fail.clear()
    served.run(LONG, 2)
    for layer in LAYERS:
        assert np.count_nonzero(served.engine.cache.resident(layer)) == K


def data_start(file: Path) -> int:
    with file.open("rb") as stream:
        return 8 + int(struct.unpack("<Q", stream.read(8))[0])


def test_a_file_cut_short_under_a_running_service(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    served = serve(folder, experts_per_layer=K)
    expected = served.run(LONG, 4)[1]
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    os.truncate(file, data_start(file))
    failed = served.wait(served.submit(LONG, 4))
    assert isinstance(failed, Failed)
    assert failed.code == "MODEL"
    assert str(file) in failed.message
    assert "the file ends at byte" in failed.message
    with file.open("r+b") as stream:  # the same file, whole again: no restart is needed
        stream.write(whole)
    assert served.run(LONG, 4)[1] == expected


def test_a_file_exchanged_under_a_running_service_is_not_taken_for_the_old_one(
    serve: Serve, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    served = serve(folder, experts_per_layer=K)
    expected = served.run(LONG, 4)[1]
    file = folder / "model.safetensors"
    other = file.with_suffix(".new")
    header = json.dumps({}).encode()
    other.write_bytes(struct.pack("<Q", len(header)) + header)
    other.replace(file)
    assert served.run(LONG, 4)[1] == expected  # the open file is still the old one
