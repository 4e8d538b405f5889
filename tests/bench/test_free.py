"""What a model writes by itself: loops show as worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coli_server.bench import free
from coli_server.bench.free import render, repetition
from coli_server.bench.served import Continuation
from coli_server.cli import bench
from coli_server.engine.api import Finished
from coli_server.telemetry.counters import Counters
from support.served import TINY


def text(*ids: int) -> Continuation:
    return Continuation(ids, Finished(1, "length", Counters(), len(ids), 1, None, 0.0))


def test_repetition_counts_sequences_that_came_before() -> None:
    assert repetition(range(20)) == (0, 17)
    assert repetition([1, 2, 3, 4] * 5) == (13, 17)
    assert repetition([7] * 10) == (6, 7)
    assert repetition([1, 2, 3]) == (0, 0)


def test_a_policy_whose_text_loops_is_worse_however_well_it_is_guessed() -> None:
    stock = free._result("stock", "greedy", [text(*range(40)), text(*range(50, 90))], -200.0, None)
    loops = free._result("max-rank", "greedy", [text(*[1, 2, 3] * 13), text(*range(50, 90))], -20.0, stock)
    same = free._result("max-rank", "greedy", [text(*range(40)), text(*range(60, 100))], -200.0, stock)
    assert loops.perplexity < stock.perplexity
    assert loops.worse
    assert not same.worse
    assert not stock.worse
    assert stock.distinct == (100.0, 100.0, 100.0)
    assert loops.distinct[0] < 60.0
    assert "max-rank, greedy: WORSE" in render([stock, loops])
    assert "WORSE" not in render([stock, same])


@pytest.mark.parametrize("scope", ["session", "shared"])
def test_the_command(scope: str, prose: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["free", "--model", str(TINY), "--text", str(prose), "--windows", "3", "--window", "8"]
    words += ["--tokens", "12", "--route-scope", scope, "--route-j", "0", "--route-m", "16", "--json"]
    status = bench.main(words)
    results = json.loads(capsys.readouterr().out)
    assert status == int(any(result["worse"] for result in results))
    assert [(result["way"], result["mode"]) for result in results] == [
        ("greedy", "stock"),
        ("greedy", f"max-rank,J=0,M=16,{scope}"),
        ("sampled", "stock"),
        ("sampled", f"max-rank,J=0,M=16,{scope}"),
    ]
    stock, routed, *_ = results
    assert stock["swap_pct"] == 0.0 < routed["swap_pct"]
    assert all(0 < result["length"] <= 12 and result["perplexity"] > 1 for result in results)
