"""Writes coli.json, the Grafana dashboard: `python deploy/grafana/dashboard.py`. Panels are listed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("coli.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = '{job=~"$job",instance=~"$instance"}'
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


@dataclass(frozen=True)
class Query:
    """One line of a panel; `expr` is PromQL in which `#` stands for the choice of daemons."""

    legend: str
    expr: str
    right: str = ""  # unit of an axis of its own, on the right

    @property
    def promql(self) -> str:
        return self.expr.replace("#", WHERE)


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    help: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None


def rate(name: str) -> str:
    return f"sum(rate(coli_{name}#[$__rate_interval]))"


def total(name: str) -> str:
    return f"sum(coli_{name}#)"


def share(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


def quantiles(histogram: str, *shares: float) -> tuple[Query, ...]:
    buckets = f"sum by (le) (rate(coli_{histogram}_seconds_bucket#[$__rate_interval]))"
    return tuple(Query(f"p{100 * q:g}", f"histogram_quantile({q}, {buckets})") for q in shares)


OUTCOMES = ("stop", "length", "cancelled", "deadline", "drained", "error")
SWAPPED = share("route_swaps_total", "route_slots_total")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel(
            "Ready", "none", "1: new requests can be served.", (Query("{{instance}}", "coli_ready#"),), "stat"
        ),
        Panel(
            "Daemons",
            "none",
            "Version, model and mode of each daemon.",
            (Query("{{instance}} {{version}} {{model}} {{mode}}", "coli_info#"),),
            "table",
        ),
        Panel(
            "Running and waiting",
            "none",
            "Requests that the engine works on, and those in the queue.",
            (Query("running", total("requests_running")), Query("waiting", total("requests_waiting"))),
        ),
    ),
    "Requests": (
        Panel(
            "Tokens per second",
            "none",
            "Tokens of prompts that were read, and tokens that were generated.",
            (
                Query("prompt", rate("prompt_tokens_total")),
                Query("generated", rate("generated_tokens_total")),
            ),
        ),
        Panel(
            "Time to first token",
            "s",
            "From ACK to the first token.",
            quantiles("time_to_first_token", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Inter-token latency",
            "s",
            "Between two tokens of one request.",
            quantiles("inter_token_latency", 0.5, 0.9, 0.99),
        ),
        Panel("End to end", "s", "From ACK to DONE.", quantiles("request", 0.5, 0.9, 0.99)),
        Panel(
            "Queue", "s", "From ACK until the engine takes the request.", quantiles("queue", 0.5, 0.9, 0.99)
        ),
        Panel(
            "Finish reasons",
            "reqps",
            "How requests ended.",
            tuple(Query(name, rate(f"requests_{name}_total")) for name in OUTCOMES),
            stacked=True,
        ),
    ),
    "Experts": (
        Panel(
            "Where experts were found",
            "percentunit",
            "Lookups of pinned experts, of experts in the LRU, and misses. They add up to all.",
            (
                Query("pin", share("hits_pin_total", "lookups_total")),
                Query("LRU", share("hits_lru_total", "lookups_total")),
                Query("miss", share("misses_total", "lookups_total")),
            ),
            stacked=True,
            most=1,
        ),
        Panel(
            "Swaps and agreement beside speed",
            "percentunit",
            "What cache-aware routing changes, and what it gains. Agreement is 1 with the stock router.",
            (
                Query("swapped", SWAPPED),
                Query("agreement", f"1 - {SWAPPED}"),
                Query("tokens/s", rate("generated_tokens_total"), right="none"),
            ),
        ),
        Panel(
            "Divergence (KL)",
            "none",
            "Mean divergence of the weights from those of the stock router, in nats.",
            (Query("KL", share("route_kl_sum_total", "route_rows_total")),),
        ),
        Panel(
            "Bytes read per token",
            "bytes",
            "Bytes of experts read from disk, over all tokens of prompts and answers.",
            (
                Query(
                    "bytes/token",
                    f"{rate('load_bytes_total')} / "
                    f"({rate('prompt_tokens_total')} + {rate('generated_tokens_total')})",
                ),
            ),
        ),
        Panel(
            "Time waiting for disk",
            "percentunit",
            "Share of the time in which the engine waited for experts.",
            (Query("waiting", rate("wait_seconds_total")),),
        ),
        Panel(
            "Reading an expert",
            "s",
            "One read of one expert, and how long the engine waited in one layer of one step.",
            tuple(
                Query(f"{word} {query.legend}", query.expr)
                for word, name in (("read", "expert_load"), ("wait", "expert_wait"))
                for query in quantiles(name, 0.5, 0.99)
            ),
        ),
        Panel(
            "Evictions and prefetch",
            "none",
            "Experts per second: dropped to make room; fetched ahead and used, late, or wasted.",
            (
                Query("evictions", rate("evictions_total")),
                Query("used", rate("prefetch_used_total")),
                Query("late", rate("prefetch_late_total")),
                Query("wasted", rate("prefetch_wasted_total")),
            ),
        ),
    ),
    "Process": (
        Panel(
            "Memory against budget",
            "bytes",
            "What the process holds and what it may: cached experts and KV caches are part of the budget.",
            (
                Query("in RAM", total("rss_bytes")),
                Query("budget", total("ram_bytes")),
                Query("experts", total("cache_bytes")),
                Query("KV", total("kv_bytes")),
            ),
        ),
        Panel(
            "Event loop lag",
            "s",
            "How late the loop runs a timer. Above some milliseconds every answer is late.",
            quantiles("event_loop_lag", 0.5, 0.99),
        ),
        Panel(
            "Connections and sessions",
            "none",
            "What is open now.",
            (
                Query("connections", total("connections_current")),
                Query("sessions", total("sessions_current")),
            ),
        ),
        Panel(
            "Refused",
            "reqps",
            "Requests and commands that were not served, and experts that could not be read.",
            (
                Query("BUSY", rate("busy_queue_total")),
                Query("bad commands", rate("protocol_errors_total")),
                Query("slow readers", rate("slow_readers_total")),
                Query("disk errors", rate("load_errors_total")),
            ),
        ),
    ),
}


def panels() -> Iterator[Panel]:
    """All panels, in order."""
    for row in ROWS.values():
        yield from row


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    return {
        "uid": "coli",
        "title": "Coli",
        "description": "Requests, routing, expert cache and process of Coli daemons.",
        "tags": ["coli", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [_source(), _choice("job", "coli_ready"), _choice("instance", 'coli_ready{job=~"$job"}')]
        },
        "panels": list(_laid_out()),
    }


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "current": {},
    }


def _choice(label: str, of: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({of}, {label})", "refId": label},
        "definition": f"label_values({of}, {label})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _laid_out() -> Iterator[dict[str, Any]]:
    id, y = 0, 0
    for title, row in ROWS.items():
        id += 1
        yield {
            "id": id,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }
        y += 1
        for index, panel in enumerate(row):
            id += 1
            x, down = index * WIDTH % COLUMNS, index * WIDTH // COLUMNS
            yield _panel(panel, id, {"x": x, "y": y + down * HEIGHT, "w": WIDTH, "h": HEIGHT})
        y += -(-len(row) * WIDTH // COLUMNS) * HEIGHT


def _panel(panel: Panel, id: int, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind != "timeseries"
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if not instant:
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    made: dict[str, Any] = {
        "id": id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": [*_right_axes(panel)]},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.promql,
                "legendFormat": query.legend,
                "range": not instant,
                "instant": instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
    }
    if panel.kind == "table":
        hidden = dict.fromkeys(("Time", "Value", "__name__"), True)
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _right_axes(panel: Panel) -> Iterator[dict[str, Any]]:
    for query in panel.queries:
        if query.right:
            yield {
                "matcher": {"id": "byName", "options": query.legend},
                "properties": [
                    {"id": "unit", "value": query.right},
                    {"id": "custom.axisPlacement", "value": "right"},
                ],
            }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value_and_name",
    },
    "table": {"showHeader": True},
}


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n", "utf-8")
