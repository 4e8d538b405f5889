"""The load generator against a real daemon: nothing is lost, all adds up; it notices when not."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from coli_server.bench import checks, soak
from coli_server.bench.checks import Footprint, broken_accounts, broken_invariants
from coli_server.bench.load import Lengths, Sample, Tally
from coli_server.bench.serve import quantiles
from coli_server.errors import ConfigurationError


@pytest.fixture(scope="module")
def daemon(start_daemon: Any, small_model: Path) -> Any:
    flags = ("--max-connections", "2048", "--queue-length", "128", "--log-level", "error")
    with start_daemon("--model", str(small_model), *flags) as started:
        yield started


MIXED = ["--chat", "0.3", "--slow", "0.1", "--vanish", "0.1", "--prompt", "4-32", "--output", "2-8"]


def test_a_thousand_idle_connections_and_64_sessions_at_work_lose_nothing(daemon: Any, run_coli: Any) -> None:
    flags = ["--clients", "64", "--requests", "192", "--idle", "1000", "--json", *MIXED]
    done = run_coli("bench", "serve", "--connect", daemon.address, *flags)
    report = json.loads(done.out)
    assert (done.status, report["wrong"]) == (0, [])
    assert report["during"]["connections"] > 1000
    assert report["during"]["descriptors"] > 1000
    assert report["after"]["descriptors"] <= report["before"]["descriptors"] + 2
    assert report["requests"] == 192 == report["completed"] + report["vanished"]
    assert set(report["first_token"]) == {"p50", "p90", "p99", "max"}


def test_an_open_loop_counts_refusals_and_time_from_when_a_request_was_due(
    daemon: Any, run_coli: Any, tmp_path: Path
) -> None:
    samples = tmp_path / "samples"
    flags = ["--rate", "200", "--clients", "4", "--requests", "40", "--samples", str(samples), *MIXED]
    done = run_coli("bench", "serve", "--connect", daemon.address, *flags)
    assert done.status == 0
    assert "open, 200 requests/s loop, 4 clients" in done.out
    assert "every request has one last line" in done.out
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 40
    assert all(line["seconds"] >= (line["first"] or 0) for line in lines)


def test_a_short_soak_leaves_nothing_behind(daemon: Any, run_coli: Any) -> None:
    flags = ["--minutes", "0.05", "--clients", "8", "--json", *MIXED]
    done = run_coli("bench", "soak", "--connect", daemon.address, *flags)
    report = json.loads(done.out)
    assert (report["wrong"], report["end"]["kv_bytes"], report["end"]["sessions"]) == ([], 0, 0)
    assert report["end"]["loop_tasks"] == report["baseline"]["loop_tasks"]


def test_nobody_at_the_address_is_one_line(run_coli: Any) -> None:
    done = run_coli("bench", "serve", "--connect", "127.0.0.1:1")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "127.0.0.1:1" in done.err


FIGURES = dict.fromkeys(
    [
        *(f"requests_{name}_total" for name in checks.OUTCOMES),
        *["requests_running", "requests_waiting", "requests_total"],
        *["hits_pin", "hits_lru", "misses", "lookups"],
        *["prefill_lookups", "prefill_hits_pin", "prefill_hits_lru", "prefill_misses", "prefetch_issued"],
        *(f"prefetch_{name}" for name in ("used", "late", "wasted", "failed", "in_flight")),
    ],
    "0",
)


@pytest.mark.parametrize("name", ["requests_total", "hits_lru", "prefill_misses", "prefetch_late"])
def test_a_counter_that_does_not_add_up_is_named(name: str) -> None:
    assert broken_invariants(FIGURES) == []
    assert len(broken_invariants({**FIGURES, name: "1"})) == 1


def test_requests_that_are_lost_counted_twice_or_answered_unasked_are_told() -> None:
    tally = Tally(
        [Sample(0.0, "completed", acknowledged=True), Sample(0.0, "vanished"), Sample(0.0, "refused")]
    )
    assert broken_accounts({"requests_total": "0"}, {"requests_total": "2"}, tally) == []
    assert broken_accounts({"requests_total": "0"}, {"requests_total": "1"}, tally) == []
    for total in "03":
        assert len(broken_accounts({"requests_total": "0"}, {"requests_total": total}, tally)) == 1
    tally.samples.append(Sample(0.0))
    tally.strays = 2
    assert len(broken_accounts({"requests_total": "0"}, {"requests_total": "1"}, tally)) == 2
    assert len(broken_accounts({"requests_total": "5"}, {"requests_total": "4"}, Tally())) == 2


def test_growth_beyond_five_percent_is_told() -> None:
    baseline = Footprint(20, 10, 10**9, 5, 0, 1, 0)
    assert soak.grown(baseline, baseline) == []
    assert soak.grown(baseline, Footprint(22, 10, 1_040_000_000, 5, 0, 1, 0)) == []
    worse = Footprint(23, 11, 1_060_000_000, 6, 1, 2, 1)
    assert len(soak.grown(baseline, worse)) == 7
    assert soak.grown(Footprint(None, None, 10**9, 5, 0, 1, 0), baseline) == []


def test_lengths_are_read_strictly_and_drawn_within_their_bounds() -> None:
    rng = random.Random(1)
    drawn = [Lengths.parse("4-64").draw(rng) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (4, 64)
    assert 0.4 < sum(length < 16 for length in drawn) / len(drawn) < 0.6
    assert str(Lengths.parse("7")) == "7"
    for word in ("", "0", "5-4", "-1", "1_0", "3-", "x"):
        with pytest.raises(ConfigurationError, match="N or N-M"):
            Lengths.parse(word)


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([]) == {}
    assert quantiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert quantiles(list(map(float, range(1, 101))))["p90"] == 90.0


def test_a_loop_that_never_gets_quiet_is_an_error() -> None:
    class Busy:
        async def stat(self) -> dict[str, str]:
            return {**FIGURES, "requests_running": "1", "connections_current": "1"} | dict.fromkeys(
                ("sessions_current", "loop_tasks", "kv_bytes"), "1"
            )

    with pytest.raises(checks.LoadError, match="1 running"):
        asyncio.run(checks.quiet(Busy(), seconds=0.5))  # type: ignore[arg-type]
