"""The default model behind a real daemon, talked to with netcat and with a memcached client."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymemcache.client.base import Client as MemcacheClient

from coli_server.models import ensure_default_model

PROMPT = "GEN max=48 temp=0 Once upon a time there was a king who"
LAYERS, K = 30, 8


@pytest.fixture(scope="module")
def model() -> Path:
    """The pulled default model; the first use on a machine fetches and makes it."""
    return ensure_default_model()


def netcat(daemon: Any, text: str) -> list[str]:
    """What a person sees: `printf text | nc host port`, through netcat itself where there is one."""
    if program := shutil.which("nc"):
        command = [program, "-N", daemon.host, str(daemon.port)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()
    with socket.create_connection((daemon.host, daemon.port), timeout=120) as connection:
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile(encoding="utf-8", newline="\n").read().splitlines()


def done_words(lines: list[str]) -> dict[str, str]:
    last = next(line for line in lines if line.startswith("DONE "))
    return dict(word.split("=", 1) for word in last.split()[2:])


def stat(daemon: Any, section: str = "") -> dict[str, str]:
    lines = netcat(daemon, f"STAT {section}\n")
    assert lines[-1] == "END"
    return dict(line.split(" ", 2)[1:] for line in lines[:-1])  # type: ignore[misc]


@pytest.fixture(scope="module")
def stock(start_daemon: Any, model: Path) -> Iterator[Any]:
    with start_daemon("--model", str(model), "--experts-per-layer", "8") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def routed(start_daemon: Any, model: Path) -> Iterator[Any]:
    with start_daemon("--model", str(model), "--experts-per-layer", "8", CACHE_ROUTE="1") as daemon:
        yield daemon


def test_cache_aware_routing_swaps_experts_and_hits_more(stock: Any, routed: Any) -> None:
    without, with_it = done_words(netcat(stock, PROMPT + "\n")), done_words(netcat(routed, PROMPT + "\n"))
    for words in (without, with_it):
        steps = int(words["tokens"]) - 1
        assert int(words["route_slots"]) == int(words["lookups"]) == steps * LAYERS * K
    assert without["mode"] == "stock"
    assert int(without["route_swaps"]) == 0
    assert with_it["mode"] == "max-rank"
    assert with_it["scope"] == "shared"
    assert int(with_it["route_swaps"]) > 0
    assert float(with_it["route_agree"]) == pytest.approx(100 - float(with_it["swap_pct"]), abs=0.11)
    assert float(with_it["route_kl"]) > 0
    assert float(with_it["hit_pct"]) > float(without["hit_pct"])


def test_the_counters_of_the_daemon_add_up(stock: Any) -> None:
    netcat(stock, PROMPT + "\n")
    figures = stat(stock)
    for prefix in ("", "prefill_"):
        parts = [int(figures[f"{prefix}{name}"]) for name in ("hits_pin", "hits_lru", "misses")]
        assert int(figures[f"{prefix}lookups"]) == sum(parts) > 0
    assert int(figures["misses"]) > 0
    assert int(figures["evictions"]) > 0
    assert int(figures["load_bytes"]) == int(figures["loads"]) * 3 * 32 * 576 * 2
    assert int(figures["cache_slots_per_layer"]) == 8


def test_a_question_is_answered_in_sentences_and_then_the_session_is_shown(stock: Any) -> None:
    lines = netcat(stock, "CHAT max=64 What is the capital of France?\nSTAT session\n")
    assert lines[0].startswith("ACK 1 prompt_tokens=")
    assert any("Paris" in line for line in lines if line.startswith("TOK 1 "))
    assert f"STAT generated_tokens_total {done_words(lines)['tokens']}" in lines
    assert lines[-1] == "END"


def test_stats_can_be_read_by_a_memcached_client(stock: Any) -> None:
    client = MemcacheClient((stock.host, stock.port), timeout=30)
    figures = client.stats()
    client.close()
    assert figures[b"model_type"] == b"glm4_moe"
    assert {b"hit_pct", b"swap_pct", b"requests_total"} <= figures.keys()


def test_every_capacity_gives_the_same_text(stock: Any, start_daemon: Any, model: Path) -> None:
    def texts(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("TOK ")]

    with start_daemon("--model", str(model), "--experts-per-layer", "11") as larger:
        assert texts(netcat(larger, PROMPT + "\n")) == texts(netcat(stock, PROMPT + "\n"))


def test_sigterm_lets_the_running_request_finish(start_daemon: Any, model: Path) -> None:
    with start_daemon("--model", str(model), "--drain-seconds", "60") as daemon:
        with socket.create_connection((daemon.host, daemon.port), timeout=120) as connection:
            stream = connection.makefile(encoding="utf-8", newline="\n")
            connection.sendall(b"GEN id=x max=60 temp=0 Once upon a time\n")
            while not stream.readline().startswith("TOK "):
                pass
            daemon.process.terminate()
            while not (line := stream.readline()).startswith("DONE "):
                assert line.startswith(("TOK ", "INFO "))
            assert "tokens=60" in line
        assert daemon.process.wait(60) == 0
