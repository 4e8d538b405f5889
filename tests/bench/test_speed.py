"""`coli bench speed`: its models, its verdicts, its parts on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from coli_server.bench import speed, speed_model
from coli_server.bench.speed_report import Report, Row
from coli_server.bench.speed_worker import Worker
from coli_server.cli import main
from coli_server.engine import Engine
from coli_server.experts import CheckpointIndex


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark model, but narrow."""
    for name, value in {"HIDDEN": 32, "WIDTH": 16, "EXPERTS": 8, "K": 2, "HEADS": 4, "VOCAB": 300}.items():
        monkeypatch.setattr(speed_model, name, value)


def quiet(_text: str) -> None:
    pass


@pytest.mark.usefixtures("small")
def test_the_model_is_the_same_every_time_and_for_the_peer(tmp_path: Path) -> None:
    made = speed_model.make_model(tmp_path, 2, quiet)
    again = speed_model.make_model(tmp_path / "other", 2, quiet)
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    stored = CheckpointIndex.open(made).read(name)
    np.testing.assert_array_equal(stored, CheckpointIndex.open(again).read(name))
    file = speed_model.make_gguf(made, quiet)
    theirs = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    down = theirs["blk.1.ffn_down_exps.weight"].data
    np.testing.assert_array_equal(np.asarray(down)[7].reshape(-1).view(np.uint16), stored.reshape(-1))
    assert len(theirs) == 3 + 2 * 12
    assert speed_model.make_model(tmp_path, 2, quiet) == made


@pytest.mark.usefixtures("small")
def test_a_worker_reads_decodes_and_counts_what_it_read(tmp_path: Path) -> None:
    made = speed_model.make_model(tmp_path, 2, quiet)
    engine = Engine.open(made, experts_per_layer=2, context=64)
    worker = Worker(engine)
    assert len(worker.answer({"do": "prefill", "ids": [1, 2, 3]})["logits"]) == 1
    worker.answer({"do": "policy", "policy": {"mode": "max-rank", "j": 0, "m": 8}})
    before = engine.cache.counters.loads
    answer = worker.answer({"do": "decode", "ids": [4, 5]})
    assert answer["loads"] == engine.cache.counters.loads - before
    assert answer["bytes"] == answer["loads"] * 3 * 32 * 16 * 2
    engine.close()


def test_verdicts_follow_goals_in_both_directions() -> None:
    assert Row.against("speed", [9, 10, 30], [10, 10], 1.0).verdict == "PASS"
    assert Row.against("speed", [9, 9.9, 30], [10], 1.0).verdict == "MISS"
    assert Row.against("speed", [9], None, 1.0).verdict == "-"
    assert Row("memory", 5, 4, 1.25, 1.05, at_most=True).verdict == "MISS"
    assert Row("memory", 4, 4, 1.0, 1.05, at_most=True).verdict == "PASS"


def test_the_report_is_a_table_and_json() -> None:
    report = Report("a machine", "coli bench speed", rows=[Row.against("decode16", [20, 22], [10], 1.0)])
    assert "| decode16 | 21 (20 to 22) | 10 | 2.1 | >= 1 | PASS |" in report.markdown()
    assert json.loads(report.json())["rows"][0]["verdict"] == "PASS"


def test_parts_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed", "--only", "decode16,decode2"]) == 2
    assert "--only=decode2" in capsys.readouterr().err
    assert {part for part in speed.PARTS if part[-1].isdigit()} == set(speed.GOALS)
