"""The expert store of real daemons: what they learn, pin, read ahead and say about it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

import coli_client


def test_what_a_daemon_learned_is_pinned_by_the_next_one(start_daemon, small_model: Path, tmp_path: Path):
    flags = ("--model", str(small_model), "--experts-per-layer", "8", "--history", str(tmp_path))
    with start_daemon(*flags) as daemon:
        with coli_client.Client(daemon.host, daemon.port) as client:
            client.generate("one two three", max=40).wait()
            assert client.stat()["pinned_experts"] == "0"
        assert daemon.stop() == 0
    (file,) = tmp_path.iterdir()
    learned = np.array(list(json.loads(file.read_text())["layers"].values()))
    assert learned.sum() > 0
    with start_daemon(*flags, PIN_RAM="1G") as daemon:
        with coli_client.Client(daemon.host, daemon.port) as client:
            client.generate("one two three", max=40).wait()
            stat = client.stat()
        ready = next(i for i, line in enumerate(daemon.log) if line.startswith("READY"))
        assert any(re.match(r"pinning experts: 8 of 8", line) for line in daemon.log[:ready])
    assert stat["pinned_experts"] == "8"  # two layers, four slots each beside those of one token
    assert int(stat["hits_pin"]) > 0
    hits = int(stat["hits_pin"]) + int(stat["hits_lru"]) + int(stat["misses"])
    assert int(stat["lookups"]) == hits


def test_pilot_shows_in_ready_and_in_the_figures(start_daemon, small_model: Path):
    flags = ("--model", str(small_model), "--experts-per-layer", "6")
    answers = []
    for pilot in ("0", "1"):
        with (
            start_daemon(*flags, PILOT=pilot) as daemon,
            coli_client.Client(daemon.host, daemon.port) as client,
        ):
            answers.append(client.generate("one two three", max=40).wait().text)
            stat = client.stat()
            ready = next(line for line in daemon.log if line.startswith("READY"))
            assert ready.rstrip().endswith("mode=stock,pilot" if pilot == "1" else "mode=stock")
            assert stat["mode"] == ("stock,pilot" if pilot == "1" else "stock")
            assert stat["pilot"] == pilot
            assert (int(stat["prefetch_issued"]) > 0) == (pilot == "1")
            outcomes = ("used", "late", "wasted", "failed", "in_flight")
            found = sum(int(stat[f"prefetch_{name}"]) for name in outcomes)
            assert int(stat["prefetch_issued"]) == found
    assert answers[0] == answers[1]
