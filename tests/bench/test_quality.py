"""`coli bench quality` on the default model: gates that pass what is identical and stop what is not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from coli_server import cli
from coli_server.bench import quality
from coli_server.bench.command import open_engine
from coli_server.bench.windows import read_texts, windows_of
from coli_server.cli import bench
from coli_server.engine import Engine
from coli_server.errors import ConfigurationError
from coli_server.settings import Settings
from support.served import TINY

SHORT = ["--windows", "2", "--window", "25", "--gate"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = bench.main(words)
    return status, capsys.readouterr().out


def test_prefetch_passes_the_gates_for_it_changes_nothing(
    prose: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = run(capsys, "--arms", "B", *SHORT, "--text", str(prose), "--json")
    report = json.loads(out)
    assert status == 0
    stock, pilot = report["arms"]
    assert (stock["mode"], pilot["mode"]) == ("stock", "stock,pilot")
    assert pilot["quality"]["perplexity"] == stock["quality"]["perplexity"]
    assert pilot["quality"]["kl"]["value"] == 0.0
    assert pilot["quality"]["top1"]["value"] == 100.0
    assert [(gate["arm"], gate["passed"]) for gate in report["gates"]] == [("B", True)] * 3
    assert pilot["quality"]["tokens"] == 48
    assert stock["traffic"]["bytes_per_token"] > 0


def test_taking_whatever_is_resident_fails_the_same_gates(
    prose: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ["--route-j", "0", "--route-m", "16", "--route-scope", "session"]
    status, out = run(capsys, "quality", "--arms", "A", *SHORT, *bad, "--text", str(prose))
    assert status == 1
    verdicts = [line for line in out.splitlines() if line.startswith("gate ")]
    assert len(verdicts) == 3
    assert any(line.endswith("FAIL") for line in verdicts)
    assert "| A | max-rank,J=0,M=16,session | - |" in out


def test_the_listing(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "--help")
    assert status == 0
    assert "quality" in out
    assert "route" in out


def test_windows_are_whole_spread_and_as_many_as_there_are(tiny: Engine, prose: Path) -> None:
    documents = read_texts([prose, prose])
    assert documents[0] == documents[1] == prose.read_text()
    ids = tiny.text.encode(documents[0])
    whole = len(ids) // 32
    everything = windows_of(tiny.text, documents, 10**6, 32)
    assert len(everything) == 2 * whole
    assert everything[1] == tuple(ids[32:64])
    few = windows_of(tiny.text, documents, 3, 32)
    assert few == [everything[0], everything[round((2 * whole - 1) / 2)], everything[-1]]
    with pytest.raises(ConfigurationError, match="a window needs"):
        windows_of(tiny.text, ["short"], 1, 512)


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    for name in ("latin.txt", "missing.txt"):
        with pytest.raises(ConfigurationError, match=name):
            read_texts([tmp_path / name])


@pytest.mark.parametrize(
    "words", [["--windows", "0"], ["--window", "x"], ["--cache", "hot"], ["--chunk", "0"]]
)
def test_malformed_flags_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        quality.main(words)


def test_half_of_the_experts_unless_told_otherwise() -> None:
    for slots, expected in ((None, 8), (5, 5)):
        engine = open_engine(Settings(model=str(TINY), experts_per_layer=slots))
        assert engine.cache.slots_per_layer == expected
        engine.close()


def test_lm_eval_without_its_package_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("lm_eval") is None:
        assert cli.main(["bench", "lm_eval", "--tasks", "x"]) == 1
        assert "pip install 'coli[lm-eval]'" in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit):
            cli.main(["bench", "lm_eval"])


@pytest.mark.parametrize(
    "words", [["--window", "1"], ["--window", "999999"], ["--chunk", "2", "--route-scope", "session"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str], prose: Path) -> None:
    with pytest.raises(ConfigurationError, match=words[0]):
        quality.main(["--model", str(TINY), "--text", str(prose), "--window", "16", *words])
