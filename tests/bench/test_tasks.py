"""Multiple choice by log-likelihood."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from coli_server.bench import tasks
from coli_server.bench.tasks import Question, best, grade, read_questions
from coli_server.cli import bench
from coli_server.engine import Engine
from coli_server.engine.sampler import log_softmax
from coli_server.engine.scoring import split_tokens
from coli_server.errors import ConfigurationError
from support.served import TINY

ROWS = [
    {"ctx": "The lamp is", "choices": [" dark", " as tall as she was", " a dog"], "gold": 1},
    {"ctx": "Water came", "choices": [" under the door", " up"], "gold": 0},
    {"ctx": "Nobody will", "choices": [" notice", " write", " sweep"], "gold": 2},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lamp.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_questions_and_their_limit(file: Path) -> None:
    questions = read_questions(file)
    assert questions[0] == Question("The lamp is", (" dark", " as tall as she was", " a dog"), 1)
    assert len(questions) == 3
    assert read_questions(file, 2) == questions[:2]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        '{"ctx": "a", "choices": ["b", "c"]}',
        '{"ctx": 1, "choices": ["b", "c"], "gold": 0}',
        '{"ctx": "a", "choices": ["b"], "gold": 0}',
        '{"ctx": "a", "choices": ["b", ""], "gold": 0}',
        '{"ctx": "a", "choices": ["b", "c"], "gold": 2}',
        '{"ctx": "a", "choices": ["b", "c"], "gold": true}',
    ],
)
def test_a_malformed_row_is_named(file: Path, row: str) -> None:
    file.write_text(json.dumps(ROWS[0]) + "\n" + row + "\n")
    with pytest.raises(ConfigurationError, match=r"lamp\.jsonl:2: "):
        read_questions(file)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(ConfigurationError, match=name):
            read_questions(tmp_path / name)


def test_acc_acc_norm_and_their_standard_errors() -> None:
    questions = [Question("", ("aa", "bbbb"), gold) for gold in (0, 1, 1, 1)]
    result = grade("t", "stock", questions, [[-1.0, -2.0], [-2.0, -1.0], [-1.0, -1.9], [-2.0, -9.0]], 100.0)
    assert result.acc == 50.0  # it says 0, 1, 0, 0
    assert result.acc_norm == 75.0  # per character: 0, the first of equals; 1; 1; 0
    assert result.acc_stderr == pytest.approx(100 * math.sqrt(0.25 / 3))
    assert best([1.0, 3.0, 3.0]) == 1


def test_answers_are_those_of_the_logits(
    file: Path, tiny: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    given, normed = 0, 0
    for row in read_questions(file):
        scores = []
        for choice in row.choices:
            before, behind = split_tokens(tiny.text, row.ctx, choice)
            rows = tiny.logits(before + behind)[len(before) - 1 : -1]
            scores.append(sum(log_softmax(r)[t] for r, t in zip(rows, behind, strict=True)))
        given += best(scores) == row.gold
        normed += best([s / len(c) for s, c in zip(scores, row.choices, strict=True)]) == row.gold
    assert bench.main(["tasks", str(file), "--model", str(TINY), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["acc"] == pytest.approx(100 * given / 3)
    assert result["acc_norm"] == pytest.approx(100 * normed / 3)
    assert (result["task"], result["mode"], result["questions"]) == ("lamp", "stock", 3)


@pytest.mark.parametrize("scope", ["session", "shared"])
def test_a_policy_is_shown_beside_stock(file: Path, scope: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(file), "--model", str(TINY), "--limit", "2", "--cache-route", "1", "--route-scope", scope]
    assert tasks.main([*words, "--route-j", "0", "--route-m", "16"]) == 0
    out = capsys.readouterr().out
    assert "| lamp | stock | 2 |" in out
    assert f"| lamp | max-rank,J=0,M=16,{scope} | 2 |" in out
