"""Reads past the page cache and from a second copy: the same bytes, and what happens where they fail."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.errors import ConfigurationError
from coli_server.experts import DirectReader, ExpertCache, MirrorReader, check_mirror, direct_buffer_bytes
from coli_server.experts.reader import read_fully
from support.faults import FaultReader

PAGE = 4096


def supports_direct(folder: Path) -> bool:
    file = folder / "probe"
    file.write_bytes(bytes(PAGE))
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        file.unlink()
    return True


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("direct") / "data"
    content = np.random.default_rng(3).integers(0, 256, 5 * PAGE + 777, np.uint8).tobytes()
    file.write_bytes(content)
    return file, content


@given(
    offset=st.integers(0, 5 * PAGE + 700),
    sizes=st.lists(st.integers(0, 2 * PAGE), min_size=1, max_size=4),
    buffer=st.sampled_from([PAGE, 2 * PAGE, 64 * PAGE]),
)
def test_any_piece_is_read_whole_whatever_its_place(data, offset, sizes, buffer):
    file, content = data
    sizes = [size for size in sizes if size]
    while sizes and offset + sum(sizes) > len(content):
        sizes.pop()
    buffers = [bytearray(size) for size in sizes]
    reader = DirectReader(buffer)
    try:
        read_fully(reader, file, [memoryview(each) for each in buffers], offset)
    finally:
        reader.close()
    assert b"".join(buffers) == content[offset : offset + sum(sizes)]


def test_pieces_on_pages_are_read_in_place(data, monkeypatch):
    file, content = data
    reader = DirectReader(PAGE)
    monkeypatch.setattr(reader, "_buffer", lambda: pytest.fail("copied through a buffer"))
    memory = np.empty(3 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    target = memory[start : start + 2 * PAGE]
    read_fully(reader, file, [target.data], PAGE)
    reader.close()
    assert target.tobytes() == content[PAGE : 3 * PAGE]


def test_the_end_of_a_file_cut_short_is_an_error(data, tmp_path):
    _, content = data
    file = tmp_path / "short"
    file.write_bytes(content[: PAGE + 10])
    reader = DirectReader(4 * PAGE)
    with pytest.raises(OSError, match=r"the file ends at byte 4106, 990 bytes too early"):
        read_fully(reader, file, [memoryview(bytearray(1000))], PAGE)
    reader.close()


def test_a_file_system_without_direct_reads_is_read_plainly_and_says_so_once(data, caplog, monkeypatch):
    file, content = data
    reader = DirectReader(PAGE)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(reader._direct, "preadv", refuse)
    with caplog.at_level(logging.WARNING, "coli.experts"):
        for _ in range(3):
            out = bytearray(100)
            read_fully(reader, file, [memoryview(out)], 5)
            assert out == content[5:105]
    reader.close()
    assert caplog.text.count("no direct reads from here") == 1


def test_a_real_file_system_without_direct_reads(caplog):
    """Memory file systems of older kernels refuse O_DIRECT, those of newer ones accept it: both must work."""
    folder = Path("/dev/shm")
    file = folder / f"coli-test-{os.getpid()}"
    file.write_bytes(b"x" * 5000)
    reader = DirectReader(2 * PAGE)
    try:
        out = bytearray(4000)
        read_fully(reader, file, [memoryview(out)], 900)
        assert out == b"x" * 4000
        assert ("no direct reads" in caplog.text) != supports_direct(folder)
    finally:
        reader.close()
        file.unlink()


def test_other_errors_are_not_taken_for_a_refusal(tmp_path):
    reader = DirectReader(PAGE)
    with pytest.raises(FileNotFoundError):
        reader.preadv(tmp_path / "none", [memoryview(bytearray(10))], 0)
    assert not reader._refused
    reader.close()


def test_a_cache_reads_the_same_experts_directly(store):
    cache = ExpertCache(store.layers, 4, reader=DirectReader(direct_buffer_bytes(360)))
    for layer in (1, 3):
        for lease in cache.stream(layer, range(8)):
            for expert, address in zip(lease.experts.tolist(), lease.addresses.tolist(), strict=True):
                assert store.held(layer, address) == store.expected(layer, expert)
    cache.close()


@pytest.fixture
def mirror(store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirror")
    for file in files(store):
        shutil.copy(file, folder)
    return folder


def files(store) -> set[Path]:
    return {p.file for layer in store.layers for source in layer.sources for p in source.parts.values()}


def use_all(store, cache) -> None:
    for layer in (1, 3):
        for lease in cache.stream(layer, range(8)):
            for expert, address in zip(lease.experts.tolist(), lease.addresses.tolist(), strict=True):
                assert store.held(layer, address) == store.expected(layer, expert)


def test_both_copies_share_the_reads(store, mirror, reader):
    check_mirror(files(store), mirror)
    shared = MirrorReader(reader, files(store), mirror)
    cache = ExpertCache(store.layers, 4, reader=shared)
    use_all(store, cache)
    cache.close()
    first, second = shared.read_bytes
    assert first + second == 2 * 8 * 360
    assert min(first, second) > 0.2 * (first + second)
    assert reader.closed


def test_the_copy_with_less_to_do_is_read(store, mirror, reader):
    shared = MirrorReader(reader, files(store), mirror)
    shared._pending = [1 << 20, 0]
    for expert in range(4):
        name, offset = store.place(1, expert)
        read_fully(shared, store.folder / name, [memoryview(bytearray(10))], offset)
    assert shared.read_bytes == [0, 40]


class BrokenCopy(FaultReader):
    """Fails every read of files below one folder."""

    broken: Path | None = None
    error: Exception | None = OSError(errno.EIO, "Input/output error")

    def preadv(self, file, buffers, offset):
        if self.broken is not None and file.parent == self.broken:
            if self.error is None:
                return 0
            raise self.error
        return super().preadv(file, buffers, offset)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), None], ids=["error", "short"])
def test_a_mirror_that_fails_is_dropped_with_one_warning(store, mirror, caplog, error):
    reader = BrokenCopy()
    reader.broken, reader.error = mirror, error
    shared = MirrorReader(reader, files(store), mirror)
    cache = ExpertCache(store.layers, 4, reader=shared)
    use_all(store, cache)
    assert cache.counters.load_errors == 0
    cache.close()
    assert shared.read_bytes == [2 * 8 * 360, 0]
    assert caplog.text.count("the mirror is not used any more") == 1


def test_a_first_copy_that_fails_is_an_error(store, mirror, reader):
    shared = MirrorReader(reader, files(store), mirror)
    shared._pending = [0, 1]
    name, offset = store.place(1, 0)
    reader.fail[(name, offset)] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        read_fully(shared, store.folder / name, [memoryview(bytearray(10))], offset)
    assert shared._pending == [0, 1], "what failed is not pending"


@pytest.mark.parametrize("damage", ["size", "header", "missing"])
def test_a_folder_that_is_no_copy_is_refused(store, mirror, damage):
    file = mirror / "layer1.safetensors"
    if damage == "size":
        file.write_bytes(file.read_bytes() + b"x")
    elif damage == "header":
        file.write_bytes(file.read_bytes().replace(b"layers.1", b"layers.9", 1))
    else:
        file.unlink()
    with pytest.raises(ConfigurationError, match=r"--mirror=.*layer1\.safetensors"):
        check_mirror(files(store), mirror)
