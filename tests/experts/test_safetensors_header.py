"""The strict header reader: what the reference writes is read, what is hostile is refused."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coli_server.experts import CheckpointError
from coli_server.experts.safetensors_header import DTYPE_BITS, read_header

TWO = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
DATA = bytes(range(32))


def encode(header: object, data: bytes = DATA) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def changed(**fields: object) -> dict[str, object]:
    """The two-tensor header with fields of `b` replaced; None removes one."""
    entry = {**TWO["b"], **fields}
    return {"a": TWO["a"], "b": {key: value for key, value in entry.items() if value is not None}}


def test_reads_what_the_reference_implementation_writes(tmp_path):
    file = tmp_path / "model.safetensors"
    arrays = {
        "wide": np.arange(12, dtype=np.float64).reshape(3, 4),
        "half": np.arange(5, dtype=np.float16),
        "flags": np.array([True, False]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.int8),
    }
    save_file(arrays, file, metadata={"format": "np"})
    header = read_header(file)
    raw = file.read_bytes()
    assert header.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = header[name]
        assert (tensor.name, tensor.file, tensor.shape) == (name, file, array.shape)
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()
    assert header["half"].dtype == "F16"


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(encode({"b": TWO["b"], "a": TWO["a"]}))
    assert list(read_header(file)) == ["a", "b"]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_known_dtype_is_known_to_the_reference(dtype):
    nbytes = DTYPE_BITS[dtype]
    content = encode({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, nbytes]}}, bytes(nbytes))
    ((name, tensor),) = safetensors.deserialize(content)
    assert (name, len(tensor["data"])) == ("a", nbytes)


HOSTILE = {
    "a negative offset": (changed(data_offsets=[-8, 0]), "tensor 'b': data_offsets"),
    "reversed offsets": (changed(data_offsets=[32, 24]), "tensor 'b': data_offsets"),
    "an offset behind the end": (changed(data_offsets=[24, 33]), "tensor 'b': data_offsets"),
    "a huge offset": (changed(data_offsets=[1 << 70, (1 << 70) + 8]), "tensor 'b': data_offsets"),
    "one offset": (changed(data_offsets=[24]), "tensor 'b': data_offsets"),
    "fractional offsets": (changed(data_offsets=[24.0, 32.0]), "tensor 'b': data_offsets"),
    "boolean offsets": (changed(data_offsets=[False, True]), "tensor 'b': data_offsets"),
    "an overlap": (changed(data_offsets=[16, 24]), "tensor 'b': overlaps"),
    "the same bytes twice": ({"a": TWO["a"], "c": TWO["a"]}, "tensor 'c': overlaps"),
    "a hole": ({"b": TWO["b"]}, "tensor 'b': leaves a hole of 24 bytes"),
    "bytes of no tensor": ({"a": TWO["a"]}, "8 bytes at the end belong to no tensor"),
    "a size that contradicts the shape": (changed(shape=[5]), "tensor 'b': 8 bytes do not hold"),
    "a negative shape": (changed(shape=[-2, -2]), "tensor 'b': shape has the size -2"),
    "a fractional shape": (changed(shape=[4.0]), "tensor 'b': shape has the size 4.0"),
    "a boolean shape": (changed(shape=[True, 4]), "tensor 'b': shape has the size True"),
    "an absurd shape": (changed(shape=[0, 1 << 60], data_offsets=[32, 32]), "tensor 'b': shape has the size"),
    "too many dimensions": (changed(shape=[1] * 64 + [4]), "tensor 'b': shape must be a list of at most 64"),
    "a shape that is no list": (changed(shape=4), "tensor 'b': shape must be a list"),
    "an unknown dtype": (changed(dtype="BF17"), "tensor 'b': dtype 'BF17' is not known"),
    "a dtype that is no text": (changed(dtype=["BF16"]), "tensor 'b': dtype"),
    "a missing field": (changed(dtype=None), "tensor 'b': must have exactly"),
    "a field too many": (changed(strides=[1]), "tensor 'b': must have exactly"),
    "an entry that is no object": ({**TWO, "c": 3}, "tensor 'c': must have exactly"),
    "metadata that is no text": (
        {**TWO, "__metadata__": {"format": 1}},
        "__metadata__ must map text to text",
    ),
    "metadata that is no object": ({**TWO, "__metadata__": "pt"}, "__metadata__ must map text to text"),
    "half a surrogate pair": ({**TWO, "\ud800": TWO["b"]}, "not valid Unicode"),
    "a name twice": (b'{"a": {}, "a": {}}', "the key 'a' appears twice"),
    "a field twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "the key 'dtype' appears twice"),
    "no JSON": (b"{nonsense}", "not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON value"),
    "an endless number": (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "deep nesting": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
    "a list": (b"[1, 2]", "does not begin with '{'"),
    "a blank before the object": (b' {"a": {}}', "does not begin with '{'"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_header_is_refused_and_named(tmp_path, fault):
    header, message = HOSTILE[fault]
    file = tmp_path / "x.safetensors"
    file.write_bytes(encode(header))
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, (1 << 64) - 1, 1 << 63, 100_000_001, 1000])
def test_a_header_length_outside_the_file_is_refused(tmp_path, length):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(500))
    with pytest.raises(CheckpointError, match=rf"header length {length} is outside 2 to 502"):
        read_header(file)


def test_a_header_over_the_limit_is_refused_without_being_read(tmp_path):
    file = tmp_path / "x.safetensors"
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", 100_000_001))
        stream.truncate(1 << 32)
    with pytest.raises(CheckpointError, match="header length 100000001 is outside 2 to 100000000"):
        read_header(file)


def test_a_file_truncated_anywhere_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    content = encode(TWO)
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(file)


def test_a_folder_a_pipe_and_nothing_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(CheckpointError):
            read_header(tmp_path / name)


def test_rows_of_a_fused_tensor(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(encode(TWO))
    a, b = read_header(file).values()
    start = len(encode(TWO)) - 32
    assert (a.row(1).offset, a.row(1).nbytes) == (start + 12, 12)
    assert (b.rows(1, 3).offset, b.rows(1, 3).nbytes) == (start + 26, 4)
    assert (a.whole().offset, a.whole().nbytes) == (start, 24)
    for begin, end in ((-1, 1), (1, 3), (2, 1)):
        with pytest.raises(CheckpointError, match=r"tensor 'a' of shape .* has no rows"):
            a.rows(begin, end)


def test_a_row_of_half_bytes_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(encode({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)))
    (tensor,) = read_header(file).values()
    with pytest.raises(CheckpointError, match="'a' is not a whole number of bytes"):
        tensor.row(0)


def assert_refused_or_consistent(file, content: bytes) -> None:
    """The one promise for any bytes: CheckpointError, or what the reference implementation finds too."""
    file.write_bytes(content)
    header = None
    try:
        header = read_header(file)
    except CheckpointError as error:
        refusal = str(error)
    if header is None:
        assert refusal.startswith(str(file))
        return
    (length,) = struct.unpack("<Q", content[:8])
    position = 8 + length
    for tensor in header.values():
        assert tensor.offset == position
        position += tensor.nbytes
    assert position == len(content)
    if b"-0" not in content:  # JSON's minus nought is no unsigned number for the reference
        reference = dict(safetensors.deserialize(content))
        assert reference.keys() == header.keys()
        for name, tensor in header.items():
            assert (reference[name]["dtype"], tuple(reference[name]["shape"])) == (tensor.dtype, tensor.shape)
            data = content[tensor.offset : tensor.offset + tensor.nbytes]
            assert bytes(reference[name]["data"]) == data


any_file = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_file
@given(
    st.lists(
        st.tuples(st.integers(0, len(encode(TWO)) - 1), st.binary(max_size=3), st.integers(0, 3)), max_size=4
    )
)
def test_any_mutation_of_a_valid_file_is_refused_or_consistent(tmp_path, edits):
    content = encode(TWO)
    for place, new, removed in edits:
        content = content[:place] + new + content[place + removed :]
    assert_refused_or_consistent(tmp_path / "x.safetensors", content)


numbers = st.integers(-1, 40) | st.sampled_from([1 << 31, 1 << 63, 1 << 64, 1.5, True, None, "8"])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "f32", 3]),
        "shape": st.lists(numbers, max_size=3),
        "data_offsets": st.lists(numbers, min_size=2, max_size=2),
    }
)


@any_file
@given(st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), entries, max_size=3))
@example(TWO)
def test_any_structure_is_refused_or_consistent(tmp_path, header):
    assert_refused_or_consistent(tmp_path / "x.safetensors", encode(header))


@any_file
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_consistent(tmp_path, content):
    assert_refused_or_consistent(tmp_path / "x.safetensors", content)
