"""Draws docs/images/top.svg and docs/images/dashboard.svg from a daemon under load and a real Prometheus.

`.venv/bin/python .ci/pictures.py [MODEL FOLDER]`; takes a minute and a half, needs the program `prometheus`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from coli_client import Client, ColiError
from coli_server.cli.top_view import View
from coli_server.cli.watch import take

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
PORT, METRICS, PROMETHEUS = 7391, 9391, 9392
SECONDS = 75
TOPICS = ("the sea", "a clock", "three friends", "a winter night", "bread", "the moon", "an old map")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH, HEIGHT, COLUMNS = 400, 190, 3


@contextlib.contextmanager
def running(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def talk(name: str, over: threading.Event) -> None:
    """One client: turns of different lengths with pauses, some cancelled."""
    dice = random.Random(name)
    with Client("127.0.0.1", PORT) as client:
        client.session(name)
        while not over.wait(dice.random() * 2):
            with contextlib.suppress(ColiError):
                prompt = f"Tell me about {dice.choice(TOPICS)}. " * dice.randint(1, 6)
                generation = client.generate(
                    prompt, max=dice.randint(8, 80), temp=0.8, seed=dice.randint(0, 999)
                )
                if dice.random() < 0.15:
                    generation.cancel()
                generation.wait()


def ask(path: str, **parameters: str) -> Any:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"http://127.0.0.1:{PROMETHEUS}/api/v1/{path}?{query}", timeout=10) as reply:
        return json.load(reply)["data"]["result"]


def chart(
    title: str, unit: str, lines: list[tuple[str, list[tuple[float, float]]]], x: float, y: float
) -> str:
    """One panel as SVG, its lower edge at 0."""
    points = [point for _, line in lines for point in line]
    left, right = min(at for at, _ in points), max(at for at, _ in points)
    top = max(value for _, value in points) or 1.0
    inner_w, inner_h = WIDTH - 70, HEIGHT - 70

    def place(at: float, value: float) -> str:
        return (
            f"{50 + (at - left) / ((right - left) or 1) * inner_w:.1f},{30 + (1 - value / top) * inner_h:.1f}"
        )

    parts = [
        f'<text x="10" y="18" font-weight="bold">{escape(title)}</text>',
        f'<path d="M50,30 V{30 + inner_h} H{50 + inner_w}" fill="none" stroke="#999"/>',
        f'<text x="46" y="36" text-anchor="end">{top:.3g}</text>',
        f'<text x="46" y="{30 + inner_h}" text-anchor="end">0</text>',
        f'<text x="46" y="52" text-anchor="end" fill="#777">{escape(unit)}</text>',
    ]
    at = 50.0
    for (name, line), colour in zip(lines, COLOURS * 2, strict=False):
        path = " ".join(place(*point) for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{at:.0f}" y="{HEIGHT - 18}" fill="{colour}">{escape(name)}</text>')
        at += 14 + 6.2 * len(name)
    return f'<g transform="translate({x},{y})">{"".join(parts)}</g>'


def dashboard(begin: float, end: float) -> str:
    """All time series of the Grafana dashboard, from what Prometheus has between two moments."""
    units = {"none": "", "s": "s", "reqps": "/s", "percentunit": "", "bytes": "bytes"}
    charts = []
    for panel in runpy.run_path(str(ROOT / "deploy/grafana/dashboard.py"))["panels"]():
        if panel.kind != "timeseries":
            continue
        lines = []
        for query in panel.queries:
            promql = (
                query.promql.replace("$__rate_interval", "10s")
                .replace("$job", ".*")
                .replace("$instance", ".*")
            )
            for series in ask("query_range", query=promql, start=str(begin), end=str(end), step="1"):
                values = [(float(at), float(value)) for at, value in series["values"]]
                points = [point for point in values if math.isfinite(point[1])]
                if query.right and points:  # an axis of its own: drawn as a share of its largest value
                    most = max(value for _, value in points) or 1.0
                    lines.append(
                        (f"{query.legend} (of {most:.3g})", [(at, value / most) for at, value in points])
                    )
                else:
                    lines.append((query.legend, points))
        lines = [line for line in lines if line[1]]
        if lines:
            x, y = len(charts) % COLUMNS * WIDTH, len(charts) // COLUMNS * HEIGHT
            charts.append(chart(panel.title, units[panel.unit], lines, x, y))
    width, height = COLUMNS * WIDTH, -(-len(charts) // COLUMNS) * HEIGHT
    body = "\n".join(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def screenshot(view: View) -> str:
    """The screen of `coli top`, 100 columns wide."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=100, height=28, file=nowhere, force_terminal=True)
        console.print(view.render(100, 28))
    return console.export_svg(title="coli top")


def main(model: list[str]) -> None:
    over = threading.Event()
    clients = [threading.Thread(target=talk, args=(name, over)) for name in ("anna", "bert", "carla", "dora")]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: coli, static_configs: [{{targets: ['127.0.0.1:{METRICS}']}}]}}]\n"
        )
        flags = [
            "--listen",
            str(PORT),
            "--metrics-port",
            str(METRICS),
            "--ram",
            "1G",
            "--experts-per-layer",
            "10",
            *model,
        ]
        daemon = stack.enter_context(
            running(sys.executable, "-m", "coli_server.cli", "serve", *flags, CACHE_ROUTE="1", PILOT="1")
        )
        assert daemon.stderr is not None
        for line in daemon.stderr:
            if line.startswith("READY"):
                break
        else:
            sys.exit("the daemon did not start")
        threading.Thread(target=daemon.stderr.read, daemon=True).start()
        stack.enter_context(
            running(
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{PROMETHEUS}",
                "--log.level=error",
            )
        )
        begin = time.time()
        for client in clients:
            client.start()
        view = View(f"127.0.0.1:{PORT}")
        with Client("127.0.0.1", PORT) as watcher:
            while time.time() - begin < SECONDS:
                view.take(take(watcher))
                time.sleep(1)
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / "top.svg").write_text(screenshot(view), "utf-8")
        (IMAGES / "dashboard.svg").write_text(dashboard(begin + 5, time.time()), "utf-8")
        over.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(["--model", sys.argv[1]] if len(sys.argv) > 1 else [])
