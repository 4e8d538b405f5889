"""`coli tune`: inside the budget, the fastest; else off."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli_server import cli
from coli_server.bench.gates import parse_gates
from coli_server.bench.summary import Interval, Quality
from coli_server.bench.tune import Candidate, advice, choose, environment, screen
from coli_server.bench.windows import Window
from coli_server.engine import Engine
from coli_server.routing import RoutePolicy
from coli_server.settings import load, policy_arguments
from support.served import TINY

EXACT = Interval(0.0, 0.0, 0.0)
QUALITY = Quality(10, EXACT, EXACT, EXACT, EXACT)
STOCK = Candidate(RoutePolicy(), QUALITY, 10.0, True)


def candidate(tok_s: float, within: bool) -> Candidate:
    return Candidate(RoutePolicy("max-rank"), QUALITY, tok_s, within)


def test_the_fastest_within_the_budget_is_chosen() -> None:
    slow, fast, fastest = candidate(11.0, True), candidate(12.0, True), candidate(20.0, False)
    assert choose(STOCK, [slow, fastest, fast]) is fast
    assert advice(fast) == "CACHE_ROUTE=1 ROUTE_MODE=max-rank ROUTE_J=2 ROUTE_M=12"


def test_off_is_best_where_nothing_allowed_is_faster() -> None:
    assert choose(STOCK, [candidate(20.0, False), candidate(9.0, True)]) is STOCK
    assert choose(STOCK, []) is STOCK
    assert advice(STOCK).startswith("Off is best")
    assert advice(STOCK).endswith("\nCACHE_ROUTE=0")


@pytest.mark.parametrize(
    "policy",
    [
        RoutePolicy("max-rank", j=3, m=20),
        RoutePolicy("max-rank", j=0, p=0.85, alpha=0.25),
        RoutePolicy("cache-prior", j=1, lam=0.05),
    ],
)
def test_the_line_makes_a_daemon_route_so(policy: RoutePolicy) -> None:
    words = dict(word.split("=") for word in environment(policy).split())
    assert RoutePolicy(**policy_arguments(load({}, words))) == policy


def test_what_the_budget_forbids_is_never_timed(tiny: Engine, windows: list[Window]) -> None:
    assert screen(tiny, windows, parse_gates("kl=0")) == []
    allowed = screen(tiny, windows, parse_gates("ppl=1000,top1=0"))
    assert allowed
    assert all(policy.scope == "shared" and policy.active for policy in allowed)


def test_nothing_is_tried_where_everything_fits(windows: list[Window]) -> None:
    engine = Engine.open(TINY, warm=False)
    assert screen(engine, windows, parse_gates("ppl=1000")) == []
    engine.close()


def test_the_command(prose: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--model", str(TINY), "--text", str(prose), "--windows", "2", "--window", "16"]
    assert cli.main([*words, "--budget", "ppl=1000%,kl=100", "--time", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("CACHE_ROUTE=")
    assert "| stock | " in out
    assert cli.main([*words, "--budget", "kl=0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "CACHE_ROUTE=0"
