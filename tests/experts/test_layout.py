"""Layouts and read plans: every byte at its place, nothing else read, in as few reads as possible."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.errors import ModelError
from coli_server.experts import (
    CheckpointIndex,
    ExpertCache,
    ExpertLayout,
    ExpertSource,
    HugePages,
    LayerExperts,
    TensorSlice,
    staging_bytes,
)
from coli_server.experts.layout import PAGE, plan_reads

A, B = Path("a"), Path("b")


def plan(**parts: TensorSlice):
    layout = ExpertLayout.plain({name: piece.nbytes for name, piece in parts.items()})
    return layout, plan_reads(layout, ExpertSource(parts))


def test_neighbours_in_the_file_are_one_read_whatever_their_order_in_the_slot():
    layout, reads = plan(
        gate=TensorSlice(A, 200, 100), up=TensorSlice(A, 300, 100), down=TensorSlice(A, 100, 100)
    )
    (read,) = reads
    assert (read.file, read.offset) == (A, 100)
    assert [(part.offset, part.nbytes) for part in read.segments] == [(256, 100), (0, 100), (128, 100)]
    assert {name: part.offset for name, part in layout.parts.items()} == {"gate": 0, "up": 128, "down": 256}


def test_neighbours_in_file_and_slot_are_one_buffer():
    _, (read,) = plan(gate=TensorSlice(A, 0, 128), up=TensorSlice(A, 128, 64))
    assert [part.nbytes for part in read.segments] == [192]


def test_other_bytes_between_two_pieces_are_not_read():
    _, reads = plan(gate=TensorSlice(A, 0, 64), up=TensorSlice(A, 65, 64))
    assert [(read.offset, read.segments[0].nbytes) for read in reads] == [(0, 64), (65, 64)]


def test_the_same_offset_in_another_file_is_no_neighbour():
    _, reads = plan(gate=TensorSlice(A, 0, 64), up=TensorSlice(B, 64, 64))
    assert [read.file for read in reads] == [A, B]


def test_small_slots_are_packed_and_large_ones_lie_on_pages():
    assert ExpertLayout.plain({"w": 100}).slot_bytes == 128
    assert ExpertLayout.plain({"w": 70_000}).slot_bytes % PAGE == 0
    assert ExpertLayout.plain({"w": 70_000, "bias": 60}).slot_bytes < 70_000 + 2 * PAGE


sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5), st.booleans()), min_size=1, max_size=6)


@given(sizes, st.integers(0, 1 << 32))
def test_running_a_plan_puts_exactly_the_pieces_at_their_places(pieces, seed):
    """Pieces of random sizes and gaps in two files, read in any order, against a copy by hand."""
    random = Random(seed)
    content = {A: random.randbytes(2000), B: random.randbytes(2000)}
    position = {A: 0, B: 0}
    parts = []
    for number, (nbytes, gap, second) in enumerate(pieces):
        file = B if second else A
        parts.append((f"p{number}", TensorSlice(file, position[file] + gap, nbytes)))
        position[file] += gap + nbytes
    random.shuffle(parts)
    layout, reads = plan(**dict(parts))
    slot = bytearray(layout.slot_bytes)
    for read in reads:
        offset = read.offset
        for segment in read.segments:
            slot[segment.offset : segment.offset + segment.nbytes] = content[read.file][
                offset : offset + segment.nbytes
            ]
            offset += segment.nbytes
    for name, piece in parts:
        part = layout.parts[name]
        assert part.offset % 64 == 0
        assert (
            slot[part.offset : part.offset + part.nbytes]
            == content[piece.file][piece.offset : piece.offset + piece.nbytes]
        )
    assert sum(segment.nbytes for read in reads for segment in read.segments) == layout_bytes(layout)
    ends = {(piece.file, piece.offset + piece.nbytes) for _, piece in parts if piece.nbytes}
    starts = [(piece.file, piece.offset) for _, piece in parts if piece.nbytes]
    assert len(reads) == sum(start not in ends for start in starts), (
        "as many reads as there are runs of bytes"
    )


def layout_bytes(layout: ExpertLayout) -> int:
    return sum(layout.stored.values())


def test_an_expert_of_other_sizes_than_its_layer_is_refused():
    layout = ExpertLayout.plain({"w": 64})
    good, bad = ExpertSource({"w": TensorSlice(A, 0, 64)}), ExpertSource({"w": TensorSlice(A, 64, 63)})
    with pytest.raises(ModelError, match="layer 5, expert 1: stored pieces"):
        LayerExperts(5, layout, [good, bad])
    with pytest.raises(ModelError, match="layer 5: no experts"):
        LayerExperts(5, layout, [])


@pytest.fixture
def fused(tmp_path, shard_writer):
    """Two fused tensors of 5 experts: packed weights uint8 [5, 8, 6] and biases bfloat16 [5, 16]."""
    random = np.random.default_rng(3)
    weights = random.integers(0, 256, (5, 8, 6), np.uint8)
    biases = random.integers(0x3F00, 0x4000, (5, 16), np.uint16)
    shard_writer(
        tmp_path / "model.safetensors",
        {"w": ("U8", weights.shape, weights.tobytes()), "b": ("BF16", biases.shape, biases.tobytes())},
    )
    index = CheckpointIndex.open(tmp_path)
    return weights, biases, [ExpertSource({"w": index["w"].row(e), "b": index["b"].row(e)}) for e in range(5)]


def widen_bias(stored, slot):
    assert stored.keys() == {"b"}, "what can be read in place is not staged"
    slot["b"].view(np.uint32)[:] = stored["b"].view(np.uint16).astype(np.uint32) << 16


def test_a_transform_fills_what_is_not_stored_as_the_slot_wants_it(fused, reader):
    weights, biases, sources = fused
    layout = ExpertLayout.transformed({"w": 48, "b": 32}, {"w": 48, "b": 64}, widen_bias)
    layers = [LayerExperts(0, layout, sources)]
    assert staging_bytes(layers, readers=3) == 3 * PAGE
    cache = ExpertCache(layers, 2, readers=3, reader=reader)
    try:
        for lease in cache.stream(0, [4, 1, 0, 2, 3]):
            for expert in lease.experts.tolist():
                slot = cache._layers[0].memory[cache._layers[0].slot_of[expert]]
                assert slot[:48].tobytes() == weights[expert].tobytes()
                widened = (biases[expert].astype(np.uint32) << 16).view(np.float32)
                assert slot[64:128].view(np.float32).tolist() == widened.tolist()
        assert cache.counters.load_bytes == 5 * (48 + 32)
        assert sum(size for _, _, size in reader.log) == 5 * (48 + 32), (
            "one expert's bytes of each fused tensor"
        )
    finally:
        cache.close()


def test_a_transform_that_fails_is_a_read_error_and_gives_the_slot_back(fused, reader):
    def refuse(_stored, _slot):
        raise ValueError("block scale\nis NaN")

    layout = ExpertLayout.transformed({"w": 48, "b": 32}, {"w": 48, "b": 64}, refuse)
    cache = ExpertCache([LayerExperts(2, layout, fused[2])], 2, reader=reader)
    try:
        with pytest.raises(ModelError, match=r"layer 2, expert 3: .*model\.safetensors: block scale is NaN"):
            list(cache.stream(2, [3]))
        assert len(cache._layers[2].free) == 2
    finally:
        cache.close()


def test_pieces_of_huge_pages_are_writable_apart_and_on_cache_lines() -> None:
    pool = HugePages()
    pieces = [pool.take(size) for size in (1, 100, 70 << 20, 3, 64)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0
        piece[:] = number
    assert [piece.nbytes for piece in pieces] == [1, 100, 70 << 20, 3, 64]
    assert all((piece == number).all() for number, piece in enumerate(pieces))
