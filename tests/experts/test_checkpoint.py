"""Checkpoint folders: layouts that exist on the hub, and folders that are broken or hostile."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from coli_server.errors import ModelError
from coli_server.experts import CheckpointError, CheckpointIndex, checkpoint

ONE = {"a": ("F32", (2,), bytes(8))}
OTHER = {"b": ("U8", (3,), b"xyz")}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path, shard_writer):
    shard_writer(tmp_path / "model-1.safetensors", ONE)
    shard_writer(tmp_path / "model-2.safetensors", OTHER)
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 11}, "weight_map": weight_map}))


def test_shards_with_an_index(sharded):
    index = CheckpointIndex.open(sharded)
    assert list(index) == ["a", "b"]
    assert index["b"].file == sharded / "model-2.safetensors"
    assert index.read("b").tobytes() == b"xyz"
    assert (len(index), index.nbytes, "a" in index, "c" in index) == (2, 11, True, False)


def test_values_are_read_into_memory_of_the_caller(sharded):
    index, room = CheckpointIndex.open(sharded), np.full(5, 7, np.uint8)
    values = index.read("b", room[1:4])
    assert room.tobytes() == b"\x07xyz\x07"
    assert np.shares_memory(values, room)
    assert values.shape == (3,)
    with pytest.raises(ValueError, match="'b' has 3 bytes, but there is room for 4"):
        index.read("b", room[:4])


def test_the_index_decides_which_files_are_shards(sharded, shard_writer):
    shard_writer(sharded / "consolidated.safetensors", ONE)
    assert list(CheckpointIndex.open(str(sharded))) == ["a", "b"]


def test_a_single_file_is_preferred_to_others(tmp_path, shard_writer):
    shard_writer(tmp_path / "model.safetensors", ONE)
    shard_writer(tmp_path / "adapter.safetensors", OTHER)
    assert list(CheckpointIndex.open(tmp_path)) == ["a"]


def test_shards_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert list(CheckpointIndex.open(sharded)) == ["a", "b"]


def test_symbolic_links_into_a_hub_cache_are_followed(tmp_path, sharded):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, name in enumerate(("model-1.safetensors", "model-2.safetensors", INDEX)):
        os.rename(sharded / name, blobs / str(number))
        os.symlink(f"../blobs/{number}", snapshot / name)
    assert CheckpointIndex.open(snapshot).read("b").tobytes() == b"xyz"


def test_hundreds_of_shards_need_no_open_files(tmp_path, shard_writer):
    names = {f"t{number}": f"model-{number}.safetensors" for number in range(300)}
    for name, shard in names.items():
        shard_writer(tmp_path / shard, {name: ("U8", (1,), b"x")})
    write_index(tmp_path, names)
    before = len(os.listdir("/proc/self/fd"))
    index = CheckpointIndex.open(tmp_path)
    assert len(index) == 300
    assert all(index.read(name)[0] == ord("x") for name in index)
    assert len(os.listdir("/proc/self/fd")) == before


def refused(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(folder)
    assert isinstance(caught.value, ModelError)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-2.safetensors").unlink()
    assert "model-2.safetensors: No such file" in refused(sharded)


def test_a_dangling_link_to_a_shard_is_named(sharded):
    (sharded / "model-2.safetensors").unlink()
    os.symlink("../blobs/gone", sharded / "model-2.safetensors")
    assert "model-2.safetensors: No such file" in refused(sharded)


def test_a_dangling_link_to_the_index_is_not_taken_for_no_index(sharded):
    (sharded / INDEX).unlink()
    os.symlink("../blobs/gone", sharded / INDEX)
    assert "broken symbolic link" in refused(sharded)


def test_a_tensor_of_the_index_that_no_shard_has_is_named(sharded):
    write_index(sharded, {"a": "model-1.safetensors", "c": "model-2.safetensors"})
    assert f"model-2.safetensors: tensor 'c' is in {INDEX} but not in this file" in refused(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded):
    write_index(sharded, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    assert "tensor 'a' is in model-1.safetensors instead" in refused(sharded)


def test_a_tensor_in_two_shards_is_named(sharded, shard_writer):
    shard_writer(sharded / "model-2.safetensors", {**OTHER, **ONE})
    assert "model-2.safetensors: tensor 'a' is also in model-1.safetensors" in refused(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "x.bin",
        "a\0.safetensors",
        7,
        None,
    ],
)
def test_a_path_in_the_index_is_refused(sharded, shard):
    write_index(sharded, {"a": "model-1.safetensors", "b": shard})
    assert f"tensor 'b': {shard!r} is not the plain name" in refused(sharded)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_a_weight_map_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    assert "weight_map must be an object" in refused(sharded)


def test_an_index_that_names_a_tensor_twice_is_refused(sharded):
    (sharded / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}')
    assert "the key 'a' appears twice" in refused(sharded)


def test_an_enormous_index_is_refused_unread(sharded):
    os.truncate(sharded / INDEX, 1 << 32)
    assert "larger than 100000000 bytes" in refused(sharded)


def test_no_folder_and_an_empty_folder_are_refused(tmp_path):
    assert "no such folder" in refused(tmp_path / "none")
    assert "no .safetensors file" in refused(tmp_path)


def test_a_missing_tensor_is_named(sharded):
    index = CheckpointIndex.open(sharded)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' is missing"):
        index["model.norm.weight"]


def test_a_wrong_shape_or_dtype_is_named(sharded):
    index = CheckpointIndex.open(sharded)
    assert index.expect("a", (2,), {"F32", "BF16"}) is index["a"]
    with pytest.raises(
        CheckpointError, match=r"model-1\.safetensors: tensor 'a' has shape \[2\], expected \[3\]"
    ):
        index.expect("a", (3,))
    with pytest.raises(CheckpointError, match="tensor 'a' has dtype F32, expected BF16 or F16"):
        index.expect("a", dtypes={"F16", "BF16"})


@pytest.mark.parametrize("chunk", [8, 64, 1 << 22])
def test_values_are_widened_exactly_whatever_the_chunk(tmp_path, shard_writer, monkeypatch, chunk):
    monkeypatch.setattr(checkpoint, "_CONVERT_CHUNK", chunk)
    values = np.array([0.0, -0.0, 1.5, -2.25, 3e38, 2**-130, np.inf, -np.inf, np.nan] * 7, np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    half = values.clip(-60000, 60000).astype(np.float16)
    shard_writer(
        tmp_path / "model.safetensors",
        {
            "bf16": ("BF16", (9, 7), bits.tobytes()),
            "f16": ("F16", (63,), half.tobytes()),
            "f32": ("F32", (63,), values.tobytes()),
            "f64": ("F64", (63,), values.astype(np.float64).tobytes()),
            "none": ("BF16", (0, 4), b""),
        },
    )
    index = CheckpointIndex.open(tmp_path)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(index.read_f32("bf16"), exact.reshape(9, 7))
    np.testing.assert_array_equal(index.read_f32("f16"), half.astype(np.float32))
    np.testing.assert_array_equal(index.read_f32("f32"), values)
    np.testing.assert_array_equal(index.read_f32("f64"), values)
    assert index.read_f32("none").shape == (0, 4)
    stored = index.read("bf16")
    assert stored.dtype == np.uint16
    assert stored.tobytes() == bits.tobytes()
    assert index.read("f16").dtype == np.uint16


def test_every_numpy_dtype_comes_back_as_written(tmp_path):
    arrays = {
        str(dtype): np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
    }
    save_file(arrays, tmp_path / "model.safetensors")
    index = CheckpointIndex.open(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(index.read(name), array)


def test_dtypes_that_cannot_be_read_are_named(tmp_path, shard_writer):
    shard_writer(tmp_path / "model.safetensors", {"q": ("F4", (4,), b"ab"), "i": ("I32", (1,), bytes(4))})
    index = CheckpointIndex.open(tmp_path)
    with pytest.raises(CheckpointError, match="tensor 'q': dtype F4 cannot be read"):
        index.read("q")
    with pytest.raises(CheckpointError, match="tensor 'i' has dtype I32, expected BF16, F16, F32 or F64"):
        index.read_f32("i")


def test_a_file_that_shrank_after_its_header_was_read_is_named(sharded):
    index = CheckpointIndex.open(sharded)
    os.truncate(sharded / "model-1.safetensors", index["a"].offset + 4)
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: tensor 'a': the file ends at byte"):
        index.read("a")


def test_header_bytes_are_all_that_opening_reads(tmp_path):
    """A shard of 1 TB (a hole, as no data is written) opens at once."""
    size = 1 << 40
    raw = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + size)
    assert CheckpointIndex.open(tmp_path)["a"].nbytes == size
