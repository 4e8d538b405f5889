"""The screen of `coli top`, made from samples."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coli_server.cli.top_view import COLUMNS, View, describe, duration, point_between, size, spark
from coli_server.cli.watch import Lost, Sample
from coli_server.telemetry.table import FIGURES

FIGURES_THAT_TOP_READS = {
    "version": "1.2.3",
    "model": "tiny%20model",
    "mode": "max-rank,J=2,M=12,shared,pilot",
    "uptime_seconds": "3661.5",
    "requests_running": "2",
    "requests_waiting": "1",
    "requests_error_total": "4",
    "requests_stop_total": "10",
    "connections_current": "3",
    "sessions_current": "2",
    "generated_tokens_total": "100",
    "lookups": "1000",
    "hits_pin": "100",
    "hits_lru": "700",
    "route_slots": "1000",
    "route_swaps": "50",
    "cache_bytes": "1048576",
    "cache_capacity_bytes": "2097152",
    "kv_bytes": "0",
    "kv_capacity_bytes": "1024",
    "rss_bytes": "3221225472",
    "ram_bytes": "2147483648",
    "model_experts": "8",
    "layers_resident": "8,4,1",
    "ttft_ms_p50": "12.3",
    "ttft_ms_p99": "45.6",
    "itl_ms_p50": "7.0",
    "itl_ms_p99": "9.9",
    "event_loop_lag_ms_p99": "0.123",
    "draining": "0",
    "engine_stalled": "0",
}
SESSIONS = {
    name: {
        "connections": "1",
        "requests_current": str(running),
        "requests_total": "5",
        "prompt_tokens_total": "6",
        "generated_tokens_total": str(tokens),
        "hit_pct": "81.2500",
        "swap_pct": "3.0000",
    }
    for name, running, tokens in (("anna", 1, 20), ("bert", 0, 30), ("~7", 0, 10))
}


def sample(moment: float = 0.0, **changes: str) -> Sample:
    return Sample(moment, {**FIGURES_THAT_TOP_READS, **changes}, SESSIONS)


def lines(view: View, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=StringIO(), width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(view.render(width, height))
    return capture.get().split("\n")[:-1]


@pytest.fixture
def view() -> View:
    view = View("127.0.0.1:7311")
    view.take(sample())
    view.take(sample(2.0, generated_tokens_total="120", lookups="1100", hits_lru="750", route_slots="1100"))
    return view


def order(view: View) -> list[str]:
    return [line.split()[0] for line in lines(view) if line.split()[0:1] in (["anna"], ["bert"], ["~7"])]


def test_every_figure_that_it_reads_is_told_by_daemons() -> None:
    assert FIGURES_THAT_TOP_READS.keys() <= {figure.name for figure in FIGURES}


def test_it_says_what_serves_in_which_mode(view: View) -> None:
    text = "\n".join(lines(view))
    assert "coli 1.2.3  tiny model  up 1:01:01  ready" in text
    assert "mode  cache-aware routing: max-rank, J=2, M=12, shared, reads ahead" in text
    assert "running 2  waiting 1  ended 14  failed 4  connections 3  sessions 2" in text


def test_rates_are_those_between_two_samples(view: View) -> None:
    text = "\n".join(lines(view))
    assert "10.0/s" in text
    assert "hit              50.0 %" in text
    assert "swap              0.0 %" in text
    assert "agreement       100.0 %" in text


def test_bars_and_layers(view: View) -> None:
    text = lines(view)
    experts = next(line for line in text if line.startswith("experts"))
    assert experts.endswith("1.0 MiB of 2.0 MiB")
    assert abs(experts.count("█") - experts.count("░")) <= 1
    assert "░" not in next(line for line in text if line.startswith("process"))
    assert next(line for line in text if line.startswith("layers")).rstrip().endswith("1-8/8  █▅▂")


def test_sessions_are_sorted_by_a_key_and_the_other_way_round(view: View) -> None:
    assert order(view) == ["bert", "anna", "~7"]
    view.press("t")
    assert order(view) == ["~7", "anna", "bert"]
    view.press("n")
    assert order(view) == ["anna", "bert", "~7"]
    view.press("n")
    assert order(view) == ["~7", "bert", "anna"]
    view.press("?")
    assert order(view) == ["~7", "bert", "anna"]


def test_keys_of_columns_are_distinct_and_none_of_them_quits() -> None:
    keys = [column.key for column in COLUMNS]
    assert len({*keys, "q"}) == len(keys) + 1


@given(width=st.integers(1, 200), height=st.integers(1, 60))
def test_the_screen_is_filled_and_never_more(width: int, height: int) -> None:
    view = View("here")
    for second in range(5):
        view.take(sample(float(second), generated_tokens_total=str(second * second)))
    shown = lines(view, width, height)
    assert len(shown) == height
    assert all(len(line) <= width for line in shown)


def test_all_of_it_fits_80x24(view: View) -> None:
    shown = lines(view)
    assert shown[-1].startswith("q quit")
    assert not any("…" in line for line in shown)
    assert order(view)


def test_a_lost_daemon_is_said_and_the_last_figures_stay(view: View) -> None:
    view.take(Lost("connection refused"))
    shown = lines(view)
    assert shown[0].startswith("no answer from 127.0.0.1:7311: connection refused; trying again")
    assert any("tiny model" in line for line in shown)


def test_a_restarted_daemon_begins_anew_without_negative_rates(view: View) -> None:
    view.take(sample(9.0, uptime_seconds="1.0", generated_tokens_total="0", lookups="0", hits_pin="0"))
    assert not view.points
    view.take(sample(10.0, uptime_seconds="2.0", generated_tokens_total="5", lookups="0", hits_pin="0"))
    assert [point.tok_s for point in view.points] == [5.0]


def test_a_new_window_of_stat_gives_no_point() -> None:
    assert point_between(sample(1.0), sample(2.0, generated_tokens_total="0")) is None


def test_sessions_that_are_not_for_this_client_are_said_to_be_so() -> None:
    view = View("here")
    view.take(Sample(0.0, FIGURES_THAT_TOP_READS, None))
    assert any("administrator" in line for line in lines(view))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("stock", "stock routing"),
        ("cache-prior,J=1,lambda=0.2,session", "cache-aware routing: cache-prior, J=1, lambda=0.2, session"),
    ],
)
def test_the_mode_in_words(mode: str, words: str) -> None:
    assert describe(mode) == words


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]
    assert [duration(n) for n in (0, 59.9, 3600, 90_061)] == ["0:00:00", "0:00:59", "1:00:00", "1d 1:01:01"]
    assert spark([0, None, 50, 100, 200], 100) == "▁ ▅██"
