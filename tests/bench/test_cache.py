"""`coli bench cache`: its table, its JSON and its picture, from a real trace."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from coli_server.bench import cache
from coli_server.bench.chart import Series, line_chart, ticks
from coli_server.engine import Engine
from coli_server.engine.store import StoreOptions
from coli_server.errors import ConfigurationError
from support.served import TINY


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "t"
    engine = Engine.open(TINY, warm=False, store=StoreOptions(trace=file))
    engine.generate(np.load(TINY / "expected.npz")["ids_1"].tolist(), 40, ignore_eos=True)
    engine.close()
    return file


def test_rates_fall_with_size_and_none_is_under_the_optimum(trace: Path) -> None:
    report = cache.replay(trace)
    assert report.slots[0] == 4
    assert report.slots[-1] == 15
    assert report.tokens == 39
    assert report.lookups == 39 * 2 * 4
    for name, rates in report.miss_percent.items():
        assert all(0 < rate <= 100 for rate in rates)
        if name in ("lru", "belady", "belady-bypass"):
            assert list(rates) == sorted(rates, reverse=True)
    best = report.miss_percent["belady"]
    for name in ("lru", "lfu", "learned"):
        assert all(a >= b for a, b in zip(report.miss_percent[name], best, strict=True))


def test_it_prints_a_table_or_json_and_draws(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.svg"
    assert cache.main(["--trace", str(trace), "--slots", "4,8", "--plot", str(picture)]) == 0
    table = capsys.readouterr().out
    assert "| slots a layer | lru | lfu | learned | belady | belady-bypass |" in table
    assert table.count("\n| 8 | ") == 1
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert cache.main(["--trace", str(trace), "--slots", "8,4", "--json", "--prompts", "--chosen"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["slots"] == [4, 8]
    assert len(report["miss_percent"]["lru"]) == 2


@pytest.mark.parametrize("slots", [(3,), (17,)])
def test_impossible_sizes_are_refused(trace: Path, slots: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="accepts 4 to 16"):
        cache.replay(trace, slots=slots)


def test_a_trace_without_decoded_tokens_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t"
    engine = Engine.open(TINY, warm=False, store=StoreOptions(trace=file))
    engine.generate([3, 4, 5], 1)
    engine.close()
    with pytest.raises(ConfigurationError, match="records no decoded tokens"):
        cache.replay(file)
    assert cache.replay(file, prompts=True).tokens == 3


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 37) == [0, 10, 20, 30]
    assert ticks(8, 15) == [8, 10, 12, 14]
    assert ticks(3, 3) == [3]


def test_a_chart_escapes_its_words() -> None:
    svg = line_chart("a < b", "x & y", "z", [Series("<s>", ((1.0, 2.0), (2.0, 1.0)))])
    assert "a &lt; b" in svg
    ElementTree.fromstring(svg)
