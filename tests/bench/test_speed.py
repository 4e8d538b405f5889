"""`coli bench speed`: its models, its verdicts, its parts on a small scale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from coli_server.bench import speed, speed_disk, speed_model, speed_overhead, speed_streams
from coli_server.bench.speed_disk import default_disk, disk
from coli_server.bench.speed_kernels import KernelClock
from coli_server.bench.speed_overhead import overhead
from coli_server.bench.speed_program import coli
from coli_server.bench.speed_reads import DiskMeter
from coli_server.bench.speed_report import Report, Row, p99
from coli_server.bench.speed_worker import Worker
from coli_server.cli import main
from coli_server.engine import Engine
from coli_server.engine.kernels.rounded import HAS_BFLOAT16_DOT
from coli_server.engine.model import Checkpoint
from coli_server.engine.step import STOCK, Span
from coli_server.engine.store import StoreOptions
from coli_server.errors import ModelError
from coli_server.experts import CheckpointIndex
from support.served import TINY


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark model, but narrow."""
    for name, value in {"HIDDEN": 32, "WIDTH": 16, "EXPERTS": 8, "K": 2, "HEADS": 4, "VOCAB": 300}.items():
        monkeypatch.setattr(speed_model, name, value)
    monkeypatch.setattr(speed_streams, "IDS", range(32, 232))


@pytest.fixture
def model(small: None, tmp_path: Path) -> Path:  # noqa: ARG001 - narrow before it is made
    """Two layers of it."""
    return speed_model.make_model(tmp_path, 2, quiet)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    """It, with room for all experts."""
    made = Engine.open(model, context=64)
    yield made
    made.close()


def quiet(_text: str) -> None:
    pass


def test_the_model_is_the_same_every_time_and_for_the_peer(model: Path, tmp_path: Path) -> None:
    again = speed_model.make_model(tmp_path / "other", 2, quiet)
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    stored = CheckpointIndex.open(model).read(name)
    np.testing.assert_array_equal(stored, CheckpointIndex.open(again).read(name))
    file = speed_model.make_gguf(model, quiet)
    theirs = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    down = theirs["blk.1.ffn_down_exps.weight"].data
    np.testing.assert_array_equal(np.asarray(down)[7].reshape(-1).view(np.uint16), stored.reshape(-1))
    assert len(theirs) == 3 + 2 * 12
    assert speed_model.make_model(tmp_path, 2, quiet) == model


@pytest.mark.usefixtures("small")
def test_neighbouring_tokens_do_not_choose_the_same_experts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A narrow model needs larger weights to have the wide one's proportions."""
    narrow = {"HIDDEN": 64, "EXPERTS": 32, "K": 4, "DEVIATION": 0.02 * (2048 / 64) ** 0.5}
    for name, value in narrow.items():
        monkeypatch.setattr(speed_model, name, value)
    engine = Engine.open(speed_model.make_model(tmp_path, 3, quiet), context=128)
    sequence = engine.new_sequence(STOCK, engine.new_kv(128))
    chosen: list[tuple[int, set[int]]] = []

    class Observer:
        def observe(self, slot: int, _group: Any, selection: Any, _scores: Any) -> None:
            chosen.append((slot, set(selection.experts[0].tolist())))

    engine.model.observers.append(Observer())
    for token in speed_streams.prompt_ids(128, 0):
        engine.step([Span(sequence, (token,), prompt=False, length=sequence.position + 1)])
    engine.close()
    for layer in range(3):
        sets = [experts for slot, experts in chosen if slot == layer]
        shared = [len(one & other) for one, other in pairwise(sets)]
        # By chance 0.5 of 4; with all weights of one size it is 2.5 in the last layer.
        assert np.mean(shared) < 1


def test_every_token_that_the_model_makes_has_a_text_of_its_own(engine: Engine) -> None:
    stream = engine.text.stream([1])
    assert [stream.push(token) for token in (256, 257, 299)] == ["t256", "t257", "t299"]
    assert engine.text.encode("t256") == [engine.text.encode(letter)[0] for letter in "t256"]


def test_a_worker_reads_decodes_and_counts_what_it_read(model: Path) -> None:
    engine = Engine.open(model, experts_per_layer=2, context=64)
    worker = Worker(engine)
    assert len(worker.answer({"do": "prefill", "ids": [1, 2, 3]})["logits"]) == 1
    worker.answer({"do": "policy", "policy": {"mode": "max-rank", "j": 0, "m": 8}})
    before = engine.cache.counters.loads
    answer = worker.answer({"do": "decode", "ids": [4, 5]})
    assert answer["loads"] == engine.cache.counters.loads - before
    assert answer["bytes"] == answer["loads"] * 3 * 32 * 16 * 2
    assert worker.answer({"do": "load"}) == {"complete": False}
    engine.close()


def test_the_clock_counts_every_kernel_of_a_step_and_changes_nothing(engine: Engine) -> None:
    def step() -> Any:
        sequence = engine.new_sequence(STOCK, engine.new_kv(8))
        return engine.step([Span(sequence, (7,), prompt=False, length=1)])

    plain = step()
    clocks = []
    for _ in range(2):
        with KernelClock() as clock:
            np.testing.assert_array_equal(step(), plain)
        clocks.append(clock)
    # A layer: norm, QKV, heads, attention, out, norm, router, softmax, route, grouping, use, experts, sum.
    assert clocks[0].calls == clocks[1].calls >= 1 + 2 * 13
    assert clocks[0].seconds > 0
    before = clocks[1].calls
    step()
    assert clocks[1].calls == before


def test_the_meter_reads_other_experts_all_over_the_model(model: Path) -> None:
    layers = [experts.files for experts in Checkpoint.open(model).experts]
    meter = DiskMeter(layers, StoreOptions(readers=2))
    _, nbytes = meter.rate(0.05)
    slots = [bytes(slot[: layers[0].expert_bytes()]) for slot in meter._slots]
    meter.rate(0.05)
    again = [bytes(slot[: layers[0].expert_bytes()]) for slot in meter._slots]
    meter.close()
    assert nbytes > 0
    assert nbytes % layers[0].expert_bytes() == 0
    index = CheckpointIndex.open(model)
    parts = ("gate_proj", "up_proj", "down_proj")
    stored = {
        b"".join(
            index.read(f"model.layers.{layer}.mlp.experts.{e}.{part}.weight").tobytes() for part in parts
        )
        for layer in range(2)
        for e in range(8)
    }
    assert {*slots, *again} <= stored
    assert slots != again or len(set(slots)) == 2


def test_overhead_is_measured_on_a_model_that_is_whole_in_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROUNDS": 2, "TOKENS": 4, "PROMPT": 4}.items():
        monkeypatch.setattr(speed_overhead, name, value)
    report = Report("a machine", "coli bench speed")
    overhead(report, "small", model, "2G", 1)
    shares = [row for row in report.rows if row.name.endswith("%")]
    assert len(shares) == 2
    assert all(0 < row.value < 100 and row.goal == 1 and row.at_most for row in shares)
    calls = next(row for row in report.rows if "kernel calls" in row.name)
    assert calls.value == round(calls.value) > 26
    found = report.measured["overhead of the small"]
    assert all(answer["loads"] == 0 for answer in (*found["plain"], *found["clocked"]))
    assert all(answer["kernels"] < answer["seconds"] for answer in (*found["clocked"], *found["served"]))


def rows_or_refusal(measure: Any, report: Report) -> list[Row]:
    """The rows; none where the file system of the tests has no direct reads, which must be said."""
    try:
        measure()
    except ModelError as error:
        if "its file system has no direct reads" not in str(error):
            raise
        return []
    return report.rows


def test_the_disk_bound_rows_keep_a_quarter_of_the_experts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROUNDS": 1, "TOKENS": 8, "SETTLE": 2}.items():
        monkeypatch.setattr(speed_disk, name, value)
    report = Report("a machine", "coli bench speed")
    for row in rows_or_refusal(lambda: disk(report, model, 1), report):
        assert row.name.startswith("disk-bound, 2 of 8 experts a layer in memory: ")
        assert row.value > 0
    for answer in report.measured.get("disk", {}).get("stock", []):
        assert answer["bytes"] == answer["loads"] * 3 * 32 * 16 * 2 > 0


def test_all_arms_of_the_default_model_decode_the_same_text(
    monkeypatch: pytest.MonkeyPatch, prose: Path
) -> None:
    for name, value in {"WINDOWS": 2, "WINDOW": 16}.items():
        monkeypatch.setattr(speed_disk, name, value)
    report = Report("a machine", "coli bench speed")
    rows = rows_or_refusal(lambda: default_disk(report, TINY, 1, [prose]), report)
    assert len(rows) in (0, 8)
    if rows:
        for speed, price in (rows[0:2], rows[3:5]):
            assert speed.goal == 1.37
            assert price.spread is not None
            assert price.verdict == "-"
        found = report.measured["default_disk"]
        assert [answer["tokens"] for name in ("stock", "A", "widest") for answer in found[name]] == [15] * 6
        read = {name: sum(answer["bytes"] for answer in found[name]) for name in ("stock", "A", "widest")}
        assert read["widest"] <= read["A"] < read["stock"]


def test_bytes_that_the_page_cache_gave_are_refused(tmp_path: Path) -> None:
    assert speed_disk._from_disk({"bytes": 4096, "stored": None}, tmp_path)["bytes"] == 4096
    assert speed_disk._from_disk({"bytes": 4096, "stored": 8192}, tmp_path)["stored"] == 8192
    with pytest.raises(ModelError, match=r"only 0 of 4096 bytes came from the disk"):
        speed_disk._from_disk({"bytes": 4096, "stored": 0}, tmp_path)


def test_a_program_that_ends_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=rf"ended with status 1: .*speed_worker {tmp_path}"):
        coli(tmp_path, 1, "--ram", "1G")
    assert "config.json" in capfd.readouterr().err


def test_verdicts_follow_goals_in_both_directions() -> None:
    assert Row.against("speed", [9, 10, 30], [10, 10], 1.0).verdict == "PASS"
    assert Row.against("speed", [9, 9.9, 30], [10], 1.0).verdict == "MISS"
    assert Row.against("speed", [9], None, 1.0).verdict == "-"
    assert Row.against("start", [1, 2, 9], [3.0], 1.0, at_most=True).verdict == "PASS"
    assert Row.within("memory", 5, 4, 1.05).verdict == "MISS"
    assert Row.within("memory", 4, 4).verdict == "PASS"


def test_rounded_parts_measure_an_engine_that_rounds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or say that this processor has none."""
    for name, value in {"ROUNDS": 1, "TOKENS": 2, "PROMPT": 16, "VOCAB": 300}.items():
        monkeypatch.setattr(speed, name, value)
    report = Report("a machine", "coli bench speed")
    models, conditions = speed.Models(model.parent, 2, None), speed.Conditions(1, None, 0, [])
    speed.measure(report, ["prefill16", "prefill-rounded16"], models, conditions)
    names = ["prefill16, tokens/s", "prefill-rounded16, tokens/s"]
    assert [row.name for row in report.rows] == names[: 1 + HAS_BFLOAT16_DOT]
    assert all("AVX512-BF16" in reason for reason in report.failed.values())


def test_p99_is_what_one_in_a_hundred_exceeds() -> None:
    assert p99(range(200)) == 198
    assert p99([3.0]) == 3.0


def test_the_report_is_a_table_and_json_and_says_what_failed() -> None:
    report = Report("a machine", "coli bench speed", rows=[Row.against("decode16", [20, 22], [10], 1.0)])
    report.notes.append(speed.UNIFORM)
    report.failed["disk"] = "no disk"
    text = report.markdown()
    assert "| decode16 | 21 (20 to 22) | 10 | 2.1 | >= 1 | PASS |" in text
    assert "random weights, and those route uniformly" in text
    assert "* **disk failed**: no disk" in text
    assert json.loads(report.json())["rows"][0]["verdict"] == "PASS"


def test_parts_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed", "--only", "decode16,decode2"]) == 2
    assert "--only=decode2" in capsys.readouterr().err
    assert {part for part in speed.PARTS if part[-1].isdigit()} == set(speed.GOALS)


def test_a_part_makes_only_the_models_that_it_measures() -> None:
    assert speed._needs("default-disk", "default")
    assert not speed._needs("default-disk", "benchmark")
    assert all(
        speed._needs(part, model) for part in ("pace", "overhead") for model in ("default", "benchmark")
    )
    assert not any(speed._needs(part, "default") for part in (*speed.GOALS, "disk", "daemon"))
    assert (speed._bits("decode4"), speed._bits("default-disk")) == (4, 16)
