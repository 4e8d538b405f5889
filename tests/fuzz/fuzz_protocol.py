"""Coverage-guided fuzzing of everything that reads a client's bytes, with atheris (no part of the tests).

    pip install atheris
    PYTHONPATH=server python tests/fuzz/fuzz_protocol.py -runs=2000000 -max_len=256 found tests/fuzz/corpus

libFuzzer keeps what reaches new code in the first folder and stops at the first input that breaks one of the
rules below. A crash is reproduced by giving its file instead of the folders.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import atheris

with atheris.instrument_imports(include=["coli_server"]):
    from rules import check


def one_input(data: bytes) -> None:
    """The first byte says where the rest is cut: mostly in two, now and then into many small pieces."""
    if data:
        how, rest = data[0], data[1:]
        step = how + 1 if how < 8 else max(1, how * len(rest) // 256)
        cuts = range(step, len(rest), step) if how < 8 else [step]
        check(rest, [rest[start:stop] for start, stop in pairwise([0, *cuts, len(rest)])])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
