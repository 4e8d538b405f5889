"""The preadv reader: complete reads, bounded open files, many threads."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.experts import PreadReader
from coli_server.experts.reader import read_fully


class Script:
    """Answers reads of a file's content as told: a count of bytes at most, or an error."""

    def __init__(self, content: bytes, answers: list[int | OSError]) -> None:
        self.content = content
        self.answers = answers

    def preadv(self, _file, buffers, offset):
        answer = self.answers.pop(0) if self.answers else 1 << 30
        if isinstance(answer, OSError):
            raise answer
        done = 0
        for view in buffers:
            piece = self.content[offset : offset + min(len(view), answer - done)]
            view[: len(piece)] = piece
            done += len(piece)
            offset += len(piece)
        return done

    def close(self):
        pass


@given(
    st.binary(min_size=1, max_size=60),
    st.lists(st.integers(1, 9) | st.builds(InterruptedError), max_size=30),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(0, 70),
)
def test_any_script_of_short_reads_and_interrupts_fills_the_buffers_or_reports_the_end(
    content, answers, sizes, offset
):
    buffers = [bytearray(size) for size in sizes]
    total = sum(sizes)
    reader = Script(content, answers)
    if offset + total > len(content):
        with pytest.raises(OSError, match=f"the file ends at byte {max(offset, len(content))}") as caught:
            read_fully(reader, "name", [memoryview(buffer) for buffer in buffers], offset)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "name")
    else:
        read_fully(reader, "name", [memoryview(buffer) for buffer in buffers], offset)
        assert b"".join(buffers) == content[offset : offset + total]


def test_an_error_without_a_file_name_gets_one():
    reader = Script(b"x", [OSError(errno.EIO, "Input/output error")])
    with pytest.raises(OSError, match="Input/output error: 'shard'"):
        read_fully(reader, "shard", [memoryview(bytearray(1))], 0)


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / str(number) for number in range(40)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return paths


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_beyond_the_bound_are_closed_and_opened_again(files):
    before = open_files()
    reader = PreadReader(max_open=5)
    for _ in range(2):
        for number, path in enumerate(files):
            out = bytearray(100)
            read_fully(reader, path, [memoryview(out)], 0)
            assert out == bytes([number]) * 100
            assert open_files() - before <= 5
    reader.close()
    assert open_files() == before


def test_many_threads_share_few_open_files(files):
    before = open_files()
    reader = PreadReader(max_open=2)

    def read(step: int) -> bool:
        number = (step * 7) % len(files)
        out = bytearray(100)
        read_fully(reader, files[number], [memoryview(out)], 0)
        return out == bytes([number]) * 100

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(400)))
    assert open_files() - before <= 2
    reader.close()
    assert open_files() == before


def test_a_file_that_went_away_is_an_error(files):
    reader = PreadReader()
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        reader.preadv(files[0], [memoryview(bytearray(1))], 0)
    reader.close()
