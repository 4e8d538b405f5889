"""`coli bench sweep`: the grid, the front, and what is written."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from coli_server.bench import sweep as module
from coli_server.bench.decode import decode_alone
from coli_server.bench.summary import Interval, Quality
from coli_server.bench.sweep import Grid, Point, best_within, pareto_front, render, sweep, write
from coli_server.bench.trace import lru_misses
from coli_server.bench.windows import Window
from coli_server.cli import bench
from coli_server.engine import Engine
from coli_server.errors import ConfigurationError
from support.served import TINY

GRID = Grid(j=(0, 1), m=(6, 16), p=(0.6,), alpha=(1.0, 0.5), lam=(0.0, 0.3), cache=(10.0, 25.0, 50.0))


def point(increase: float, misses: float) -> Point:
    def exact(value: float) -> Interval:
        return Interval(value, value, value)

    quality = Quality(10, exact(20.0), exact(increase), exact(0.0), exact(100.0))
    return Point("max-rank", f"{increase}/{misses}", 8, misses, 0.0, 0.0, quality)


def test_the_grid_has_every_combination() -> None:
    policies = GRID.policies(6)
    assert len(policies) == len(set(policies)) == 2 * 2 * (2 + 1 + 2)
    assert all(policy.scope == "session" and policy.capacity == 6 for policy in policies)
    assert sum(policy.mode == "cache-prior" for policy in policies) == 8
    assert sum(policy.p > 0 for policy in policies) == 4


def test_a_sweep_reports_what_single_runs_give(tiny: Engine, windows: list[Window]) -> None:
    report = sweep(tiny, windows[:2], GRID)
    assert [panel.capacity for panel in report.panels] == [4, 8]  # 10 % is under K, and then what 25 % is
    for panel in report.panels:
        assert panel.belady_miss_pct <= panel.stock_miss_pct
        assert len(panel.points) == 20
        policies = GRID.policies(panel.capacity)
        for at in (0, 4, 13):
            runs = [decode_alone(tiny, w, policies[at], tiny.logits(w)) for w in windows[:2]]
            misses = sum(lru_misses(run.choices, tiny.experts, panel.capacity) for run in runs)
            assert panel.points[at].miss_pct == pytest.approx(
                100 * misses / sum(run.choices.size for run in runs)
            )
        unchanged = next(each for each in panel.points if "lambda=0," in each.mode)
        assert unchanged.miss_pct == panel.stock_miss_pct
        assert unchanged.quality.increase.value == unchanged.quality.kl.value == 0.0
        assert unchanged.saved_pct == 0.0


def test_the_front_has_what_nothing_beats() -> None:
    points = [point(0.0, 40.0), point(1.0, 30.0), point(1.0, 35.0), point(2.0, 30.0), point(3.0, 10.0)]
    assert pareto_front(points) == (points[0], points[1], points[4])
    assert best_within(points, 2.5) == points[1]
    assert best_within(points, -1.0) is None


def test_files_hold_the_same_figures(tiny: Engine, windows: list[Window], tmp_path: Path) -> None:
    report = sweep(tiny, windows[:1], GRID)
    write(report, tmp_path / "new" / "out")
    rows = list(csv.DictReader((tmp_path / "new/out.csv").open()))
    points = [each for panel in report.panels for each in panel.points]
    assert [row["mode"] for row in rows] == [each.mode for each in points]
    assert [float(row["miss_pct"]) for row in rows] == pytest.approx(
        [each.miss_pct for each in points], abs=1e-5
    )
    assert sum(int(row["on_front"]) for row in rows) == sum(len(panel.front) for panel in report.panels)
    report_again = json.loads((tmp_path / "new/out.json").read_text())
    assert report_again["panels"][0]["points"][3]["miss_pct"] == points[3].miss_pct
    picture = ElementTree.parse(tmp_path / "new/out.svg")
    circles = picture.findall(".//{http://www.w3.org/2000/svg}circle/{http://www.w3.org/2000/svg}title")
    shown = [each for each in points if each.quality.increase.value <= 15.0]
    assert len(circles) == len(shown) > 0
    assert "Belady" in (tmp_path / "new/out.svg").read_text()
    assert "by half or more" in render(report) or "by less than half" in render(report)


def test_the_command(prose: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--model", str(TINY), "--text", str(prose), "--windows", "1", "--window", "16"]
    words += ["--preset", "paper", "--m", "8", "--p", "none", "--lambda", "0.1", "--json"]
    assert bench.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    (panel,) = report["panels"]
    assert (panel["capacity"], report["window"]) == (8, 16)
    assert {each["mode"] for each in panel["points"]} == {
        "max-rank,J=1,M=8,session,capacity=8",
        "max-rank,J=2,M=8,session,capacity=8",
        "cache-prior,lambda=0.1,J=1,session,capacity=8",
        "cache-prior,lambda=0.1,J=2,session,capacity=8",
    }


@pytest.mark.parametrize(
    "words", [["--j", "x"], ["--p", "1"], ["--cache", "0"], ["--cache", "101"], ["--m", "0"]]
)
def test_malformed_lists_are_refused(words: list[str], prose: Path) -> None:
    with pytest.raises(ConfigurationError, match=words[0]):
        module.main(["--model", str(TINY), "--text", str(prose), *words])
