"""A real Prometheus scrapes a real daemon under load: every query of dashboard and rules has data."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coli_client import Client, ColiError
from support.ports import free_port

if TYPE_CHECKING:
    from tests.system.conftest import Daemon, StartDaemon

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PANELS = list(runpy.run_path(str(DEPLOY / "grafana/dashboard.py"))["panels"]())
CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: coli
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
SCRAPES = 25
WINDOW = "2s"

# What stays the same when all goes well.
STEADY = {
    "Ready", "Daemons", "Refused", "Connections and sessions", "Reading an expert", "Event loop lag",
}  # fmt: skip
STEADY_QUERIES = {"budget", "pin", "drained", "error", "deadline", "stop", "late", "wasted", "KV", "experts"}


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as reply:
            return json.load(reply)["data"]

    def scrapes(self) -> int:
        with suppress(urllib.error.URLError, ConnectionError, IndexError):
            return int(self.ask("query", query="count_over_time(coli_ready[5m])")["result"][0]["value"][1])
        return 0


def work(daemon: Daemon, done: threading.Event) -> None:
    """Requests of different lengths, some cancelled, until `done`."""
    with Client(daemon.host, daemon.port) as client:
        length = 1
        while not done.is_set():
            length = length % 60 + 7
            with suppress(ColiError):
                generation = client.generate("The sea " * length, max=length, route_j=length % 3)
                if length % 4:
                    generation.wait()
                else:
                    generation.cancel()


@pytest.fixture(scope="module")
def prometheus(
    start_daemon: StartDaemon, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has seen a daemon work for some scrapes."""
    folder = tmp_path_factory.mktemp("prometheus")
    metrics, own = free_port(), free_port()
    rules = DEPLOY / "prometheus/coli.rules.yml"
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=rules, port=metrics))
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}",
        "--log.level=error",
    ]
    flags = (
        "--model",
        str(small_model),
        "--ram",
        "2G",
        "--experts-per-layer",
        "4",
        "--pilot",
        "1",
        "--cache-route",
        "1",
    )
    with start_daemon(*flags, "--metrics-port", str(metrics)) as daemon:
        done = threading.Event()
        workers = [threading.Thread(target=work, args=(daemon, done)) for _ in range(3)]
        server = subprocess.Popen(command)
        try:
            found = Prometheus(f"http://127.0.0.1:{own}")
            for worker in workers:
                worker.start()
            while found.scrapes() < SCRAPES:
                assert server.poll() is None
                time.sleep(0.1)
            yield found
        finally:
            done.set()
            for worker in workers:
                worker.join()
            server.terminate()
            server.wait(60)


def numbers(result: list[dict[str, Any]]) -> list[float]:
    return [float(value) for series in result for _, value in series["values"] if value != "NaN"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_of_a_panel_has_data_that_moves(prometheus: Prometheus, panel: Any) -> None:
    now = time.time()
    for query in panel.queries:
        promql = (
            query.promql.replace("$__rate_interval", WINDOW).replace("$job", ".*").replace("$instance", ".*")
        )
        data = prometheus.ask("query_range", query=promql, start=str(now - 10), end=str(now), step="0.2")
        values = numbers(data["result"])
        assert values, f"{query.legend}: no data for {promql}"
        if panel.title not in STEADY and query.legend not in STEADY_QUERIES:
            assert len(set(values)) > 1, f"{query.legend}: always {values[0]}"


def test_every_rule_is_evaluated_has_data_and_is_quiet(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) >= 7
    for rule in group["rules"]:
        assert (rule["health"], rule.get("lastError")) == ("ok", None), rule
        assert rule["state"] != "firing", rule
        # A comparison gives nothing while it does not hold: `bool` shows that both sides had data.
        measured = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rule["query"])
        measured = re.sub(r" ([<>]) ", r" \1 bool ", measured)
        assert prometheus.ask("query", query=measured)["result"], rule["query"]
