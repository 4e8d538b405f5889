"""The dashboard and the alert rules speak of metrics that exist, and are what their formats ask for."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coli_server.telemetry.histogram import Histogram
from coli_server.telemetry.prometheus import MetricsSnapshot, exposition
from coli_server.telemetry.table import FIGURES, HISTOGRAMS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MADE = runpy.run_path(str(DEPLOY / "grafana/dashboard.py"))
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/coli.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = (DEPLOY / "prometheus/coli.rules.yml").read_text("utf-8")


def metric_names() -> set[str]:
    """Every name that a daemon's metrics page has."""
    histograms = {figure.name: Histogram().snapshot() for figure in HISTOGRAMS}
    page = exposition(MetricsSnapshot({figure.name: 1 for figure in FIGURES}, histograms)).decode()
    return set(re.findall(r"^(coli_\w+)", page, re.MULTILINE))


def test_the_file_is_what_its_script_makes() -> None:
    assert MADE["dashboard"]() == DASHBOARD, "run `python deploy/grafana/dashboard.py`"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_for_metrics_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        asked = set(re.findall(r"\bcoli_\w+", target["expr"]))
        assert asked
        assert asked <= metric_names()


def test_every_rule_asks_for_metrics_that_exist() -> None:
    asked = set(re.findall(r"\bcoli_\w+", RULES))
    assert len(asked) >= 8
    assert asked <= metric_names()


def test_every_histogram_is_shown() -> None:
    shown = {
        name
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r"coli_\w+", target["expr"])
    }
    assert {f"{h.prometheus}_bucket" for h in HISTOGRAMS if h.name not in ("prefill", "decode")} <= shown


def test_panels_have_what_grafana_asks_for() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert DASHBOARD["schemaVersion"] >= 36
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["title"]
        assert panel["description"]
        assert panel["options"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_variables_choose_a_data_source_and_daemons() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = {
        name for panel in PANELS for t in panel["targets"] for name in re.findall(r'"\$(\w+)"', t["expr"])
    }
    assert used == variables.keys() - {"datasource"}


def test_promtool_accepts_the_rules_and_their_tests_where_it_is_installed() -> None:
    assert RULES.count("- alert:") == RULES.count("summary:") == RULES.count("severity:")
    if promtool := shutil.which("promtool"):
        for words in (["check", "config", "prometheus.yml"], ["test", "rules", "coli.rules.test.yml"]):
            done = subprocess.run(
                [promtool, *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
