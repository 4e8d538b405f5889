"""The package lm-eval on a real daemon, with tasks of its own kind in local files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coli_client import Client
from coli_server.bench.lm_eval import ColiLM, main
from coli_server.errors import ConfigurationError

ROWS = [
    {"ctx": "The lamp is", "choices": [" dark", " as tall as she was", " a dog"], "gold": 1},
    {"ctx": "Water came", "choices": [" under the door", " up", " in"], "gold": 0},
    {"ctx": "Nobody will", "choices": [" notice", " write", " sweep"], "gold": 2},
]
CHOICE = """
task: lamp_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: lamp_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ctx}}"
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture(scope="module")
def model_with_beginning(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer names the token that begins a text."""
    folder = tmp_path_factory.mktemp("models") / "beginning"
    shutil.copytree(small_model, folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return folder


@pytest.fixture(scope="module")
def daemon(start_daemon: Any, model_with_beginning: Path) -> Iterator[Any]:
    with start_daemon("--model", str(model_with_beginning), "--experts-per-layer", "6") as running:
        yield running


@pytest.fixture
def lm(daemon: Any) -> ColiLM:
    return ColiLM(daemon.host, daemon.port)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "lamp.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return tmp_path


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_tasks_give_what_scores_give(daemon: Any, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--connect", daemon.address, "--tasks", "lamp_choice,lamp_rolling", "--include-path", str(tasks)]
    assert main([*words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    right, normed, logprob = 0, 0, 0.0
    with Client(daemon.host, daemon.port) as client:
        for row in ROWS:
            scores = [score.logprob for score in client.score_all([(row["ctx"], c) for c in row["choices"]])]
            scaled = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
            right += scores.index(max(scores)) == row["gold"]
            normed += scaled.index(max(scaled)) == row["gold"]
            logprob += client.score("", row["ctx"]).logprob
    size = sum(len(row["ctx"].encode()) for row in ROWS)
    assert results["lamp_choice"]["acc,none"] == pytest.approx(right / 3)
    assert results["lamp_choice"]["acc_norm,none"] == pytest.approx(normed / 3)
    assert results["lamp_rolling"]["byte_perplexity,none"] == pytest.approx(math.exp(-logprob / size))
    assert main(words) == 0
    assert "lamp_choice" in capsys.readouterr().out


def test_options_go_with_every_request(daemon: Any, lm: ColiLM) -> None:
    routed = ColiLM(daemon.host, daemon.port, cache_route=True, route_scope="session", route_j=0, route_m=16)
    pair = asked("The lighthouse had been dark", " for eleven years when Mara came")
    assert routed.loglikelihood([pair]) != lm.loglikelihood([pair])


def test_texts_end_before_the_first_stop(lm: ColiLM) -> None:
    whole, empty = lm.generate_until([asked("a b", {"max_gen_toks": 12}), asked("a b", {"max_gen_toks": 1})])
    assert len(whole) > len(empty)
    stops = ["\0never"] * 4 + [whole[5:7]]
    (cut,) = lm.generate_until([asked("a b", {"max_gen_toks": 12, "until": stops})])
    assert cut == whole[: whole.index(whole[5:7])]
    sampled = lm.generate_until([asked("a b", {"max_gen_toks": 12, "do_sample": True, "temperature": 2.0})])
    assert sampled != [whole]


def test_a_text_beyond_the_context_is_scored_in_pieces(start_daemon: Any, model_with_beginning: Path) -> None:
    text = "the sea was so many feet below the third step " * 6
    with start_daemon("--model", str(model_with_beginning), "--context", "256") as small:
        lm = ColiLM(small.host, small.port)
        short, long = lm.loglikelihood_rolling([asked(text[:40]), asked(text)])
        assert lm.loglikelihood_rolling([asked("")]) == [0.0]
    assert math.isfinite(long)
    assert long < short < 0


@pytest.mark.parametrize("word", ["temp=1", "route_j=x", "cache_route"])
def test_other_options_are_refused(word: str) -> None:
    with pytest.raises(ConfigurationError, match="--option"):
        main(["--tasks", "x", "--option", word])
