"""The fuzzer's corpus holds without a fuzzer, too: whatever it has found stays found."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.rules import check

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_the_rules_hold_for_what_the_fuzzer_has_found(path: Path) -> None:
    data = path.read_bytes()
    check(data, [data])
    check(data, [data[place : place + 1] for place in range(len(data))])
