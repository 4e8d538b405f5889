"""Every figure that Coli tells about itself, once: STAT, metrics and docs/STAT.md are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Section = Literal["server", "route", "cache", "latency"]
Kind = Literal["counter", "gauge", "ratio", "quantile", "text", "setting"]

SECTIONS: Mapping[Section, str] = {
    "server": "The process, its connections, sessions and requests",
    "route": "Routing: what is set and what it did",
    "cache": "Experts: where they were found, loads, memory",
    "latency": "Times, from histograms",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. A counter never goes down; a ratio is derived from counters when it is read.

    `prometheus` is the metric that holds the figure (for a quantile: its histogram), empty where there is
    none: a ratio is left to the query language. `session` says whether each session has its own value.
    """

    name: str
    section: Section
    kind: Kind
    unit: str
    help: str
    prometheus: str
    session: bool


@dataclass(frozen=True, slots=True)
class HistogramFigure:
    """A distribution of seconds, as the metrics port gives it."""

    name: str
    help: str

    @property
    def prometheus(self) -> str:
        return f"coli_{self.name}_seconds"


def _counter(section: Section, name: str, help: str, unit: str = "", *, session: bool = False) -> Figure:
    prometheus = f"coli_{name}" if name.endswith("_total") else f"coli_{name}_total"
    return Figure(name, section, "counter", unit, help, prometheus, session)


def _own(section: Section, name: str, help: str, unit: str = "") -> Figure:
    """A counter that every session has too."""
    return _counter(section, name, help, unit, session=True)


def _gauge(section: Section, name: str, help: str, unit: str = "") -> Figure:
    return Figure(name, section, "gauge", unit, help, f"coli_{name}", session=False)


def _ratio(section: Section, name: str, unit: str, help: str) -> Figure:
    return Figure(name, section, "ratio", unit, help, "", session=True)


def _quantile(name: str, histogram: str, help: str) -> Figure:
    return Figure(name, "latency", "quantile", "ms", help, f"coli_{histogram}_seconds", session=False)


def _text(name: str, help: str) -> Figure:
    return Figure(name, "server", "text", "", help, "coli_info", session=False)


def _setting(name: str, help: str, *, session: bool = True) -> Figure:
    return Figure(name, "route", "setting", "", help, "coli_info", session)


_S: Section = "server"
_R: Section = "route"
_C: Section = "cache"

FIGURES: tuple[Figure, ...] = (
    _text("version", "version of Coli"),
    Figure("pid", _S, "gauge", "", "process id of the daemon", "", session=False),
    _gauge(_S, "uptime_seconds", "time since the daemon began to start", "s"),
    _text("model", "name of the model"),
    _text("model_type", "family of the model, as in its config.json"),
    _text("mode", "what is on, in words: `stock`, or the routing policy and its options"),
    _gauge(_S, "ready", "1 while new requests can be served: not draining, and the engine moves"),
    _gauge(_S, "draining", "1 while the daemon finishes its work and takes no new one"),
    _gauge(_S, "connections_current", "open connections"),
    _counter(_S, "connections_total", "connections accepted"),
    _counter(_S, "connections_rejected_total", "connections refused because there were too many"),
    _counter(_S, "connections_rejected_address_total", "of these: too many from one address"),
    _gauge(_S, "sessions_current", "sessions that exist"),
    _counter(_S, "sessions_total", "sessions made"),
    _counter(_S, "sessions_evicted_total", "idle named sessions that made room for a new one"),
    _counter(_S, "sessions_expired_total", "named sessions forgotten because nobody used them for long"),
    _counter(_S, "sessions_refused_total", "named sessions refused because all are in use"),
    _counter(_S, "sessions_unsaved_total", "times that a session could not be kept on disk"),
    _gauge(_S, "requests_running", "requests that the engine works on"),
    _gauge(_S, "requests_waiting", "requests in the queue"),
    _counter(_S, "busy_queue_total", "requests refused because the queue was full"),
    _counter(_S, "busy_connection_total", "requests refused because their connection has too many"),
    _counter(_S, "busy_session_total", "requests refused because their session has too many"),
    _counter(_S, "queue_timeouts_total", "requests ended because they waited in the queue for too long"),
    _gauge(_S, "engine_stalled", "1 while a step of the engine takes longer than it may"),
    _counter(_S, "engine_stalls_total", "times that a step of the engine took longer than it may"),
    _own(_S, "requests_total", "requests acknowledged with ACK"),
    _own(_S, "requests_stop_total", "requests that ended at an end token or stop string"),
    _own(_S, "requests_length_total", "requests that ended at max tokens or a full context"),
    _own(_S, "requests_cancelled_total", "requests cancelled, or whose client went away"),
    _own(_S, "requests_deadline_total", "requests that ended at their deadline"),
    _own(_S, "requests_drained_total", "requests ended because the daemon went down"),
    _own(_S, "requests_error_total", "requests that failed after ACK"),
    _own(_S, "prompt_tokens_total", "tokens of prompts", "tokens"),
    _own(_S, "generated_tokens_total", "tokens generated", "tokens"),
    _own(_S, "decode_steps", "generated tokens, but the first of each request", "tokens"),
    _own(_S, "decode_seconds", "time from the first to the last token of each request", "s"),
    _ratio(_S, "tok_s", "tokens/s", "decode_steps / decode_seconds"),
    _gauge(_S, "ram_bytes", "memory that the process may take, as --ram says", "bytes"),
    _gauge(_S, "loop_tasks", "tasks of the event loop: a few, one a connection, one a request"),
    _gauge(_S, "rss_bytes", "memory of the process that is in RAM", "bytes"),
    _counter(_S, "protocol_errors_total", "commands refused because they could not be understood"),
    _counter(_S, "lines_too_long_total", "of these: lines over the limit"),
    _counter(_S, "payloads_too_large_total", "of these: payloads over the limit"),
    _counter(_S, "slow_readers_total", "connections closed because they did not read"),
    _counter(_S, "half_command_timeouts_total", "connections closed because half a command stood still"),
    _counter(_S, "idle_timeouts_total", "connections closed because nothing happened on them"),
    _counter(_S, "auth_failures_total", "commands refused because of a missing or wrong token"),
    _counter(_S, "bytes_in_total", "bytes received", "bytes"),
    _counter(_S, "bytes_out_total", "bytes sent", "bytes"),
    _setting("cache_route", "1 = cache-aware routing is on"),
    _setting("route_mode", "policy: max-rank or cache-prior"),
    _setting("route_j", "best experts that are always taken"),
    _setting("route_m", "max-rank: size of the window"),
    _setting("route_p", "max-rank: gate mass of the window; 0 = route_m is used"),
    _setting("route_alpha", "factor on the mass of substitutes"),
    _setting("route_lambda", "cache-prior: strength"),
    _setting("route_scope", "residency that the router sees: shared or session"),
    _setting("route_capacity", "session scope: experts remembered in each layer; 0 = half, at least K"),
    _setting("route_prefill", "1 = prompts are routed cache-aware too"),
    _setting("pilot", "1 = experts are fetched before they are asked for", session=False),
    _own(_R, "route_slots", "K summed over routed tokens and layers", "experts"),
    _own(_R, "route_swaps", "chosen experts that the stock router would not choose", "experts"),
    _ratio(_R, "swap_pct", "%", "100 * route_swaps / route_slots; 0 when nothing was routed"),
    _ratio(_R, "route_agree", "%", "100 - swap_pct; left out with ROUTE_AGREE=0"),
    _own(_R, "route_rows", "choices of one token in one layer that were measured for the next figures"),
    _own(_R, "route_kl_sum", "divergence from the stock weights, summed over route_rows", "nats"),
    _own(_R, "route_mass_sum", "share of the stock gate mass that was kept, summed over route_rows"),
    _ratio(_R, "route_kl", "nats", "route_kl_sum / route_rows; left out with ROUTE_AGREE=0"),
    _ratio(_R, "route_mass_kept", "", "route_mass_sum / route_rows; left out with ROUTE_AGREE=0"),
    _gauge(
        _R, "route_distinct_min", "distinct experts used in the last 1,000 decoded tokens, scarcest layer"
    ),
    _gauge(_R, "route_distinct_median", "the same, median of the layers: few are starvation"),
    _gauge(_R, "route_swap_run_max", "tokens in a row with one expert as a substitute, longest: lock-in"),
    _own(_C, "lookups", "experts asked for by routed tokens", "experts"),
    _own(_C, "hits_pin", "lookups of a pinned expert", "experts"),
    _own(_C, "hits_lru", "lookups of an expert in its layer's LRU", "experts"),
    _own(_C, "misses", "lookups of an expert that was not in memory", "experts"),
    _ratio(_C, "hit_pct", "%", "100 * (hits_pin + hits_lru) / lookups; 0 when there were none"),
    _own(_C, "prefill_lookups", "experts asked for by prompt tokens", "experts"),
    _own(_C, "prefill_hits_pin", "the same for prompt tokens: pinned", "experts"),
    _own(_C, "prefill_hits_lru", "the same for prompt tokens: in the LRU", "experts"),
    _own(_C, "prefill_misses", "the same for prompt tokens: not in memory", "experts"),
    _own(_C, "loads", "experts read from disk", "experts"),
    _own(_C, "load_bytes", "bytes read from disk for experts", "bytes"),
    _counter(_C, "load_errors", "experts that could not be read", "experts"),
    _counter(_C, "load_seconds", "time that readers spent reading, summed", "s"),
    _counter(_C, "wait_seconds", "time that the engine waited for an expert", "s"),
    _counter(_C, "evictions", "experts dropped to make room", "experts"),
    _counter(_C, "prefetch_issued", "experts fetched before they were asked for", "experts"),
    _counter(_C, "prefetch_used", "of these: used", "experts"),
    _counter(_C, "prefetch_late", "of these: asked for while they were loading", "experts"),
    _counter(_C, "prefetch_wasted", "of these: dropped unused", "experts"),
    _counter(_C, "prefetch_failed", "of these: not read because of an error", "experts"),
    _gauge(_C, "prefetch_in_flight", "of these: loading, or loaded and not asked for yet", "experts"),
    _gauge(_C, "model_experts", "experts that each MoE layer of the model has", "experts"),
    Figure(
        "layers_resident",
        _C,
        "text",
        "experts",
        "experts in memory, for each MoE layer, with commas between",
        "",
        session=False,
    ),
    _gauge(_C, "cache_slots_per_layer", "experts that a layer has room for", "experts"),
    _gauge(_C, "cache_bytes", "bytes of experts in memory", "bytes"),
    _gauge(_C, "cache_capacity_bytes", "bytes of experts that there is room for", "bytes"),
    _gauge(_C, "pinned_experts", "experts that are never dropped", "experts"),
    _gauge(_C, "kv_bytes", "memory held by KV caches", "bytes"),
    _gauge(_C, "kv_capacity_bytes", "memory that KV caches may hold", "bytes"),
    _counter(_C, "kv_evictions", "kept KV caches dropped to make room for a request"),
    _quantile("ttft_ms_p50", "time_to_first_token", "time from ACK to the first token, median"),
    _quantile("ttft_ms_p99", "time_to_first_token", "the same, 99th percentile"),
    _quantile("itl_ms_p50", "inter_token_latency", "time between two tokens of a request, median"),
    _quantile("itl_ms_p99", "inter_token_latency", "the same, 99th percentile"),
    _quantile("event_loop_lag_ms_p99", "event_loop_lag", "how late the event loop is, 99th percentile"),
)

HISTOGRAMS: tuple[HistogramFigure, ...] = (
    HistogramFigure("time_to_first_token", "from ACK to the first token"),
    HistogramFigure("inter_token_latency", "between two tokens of a request"),
    HistogramFigure("request", "from ACK to the end of a request"),
    HistogramFigure("queue", "from ACK until the engine takes the request"),
    HistogramFigure("prefill", "from leaving the queue to the first token"),
    HistogramFigure("decode", "from the first token to the end of a request"),
    HistogramFigure("expert_load", "reading one expert from disk"),
    HistogramFigure("expert_wait", "the engine waiting for experts in one layer of one step"),
    HistogramFigure("event_loop_lag", "how late the event loop runs a timer"),
)


def markdown() -> str:
    """The figures as Markdown, a table for each section, for docs/STAT.md."""
    lines: list[str] = []
    for section, title in SECTIONS.items():
        lines += [f"### `{section}`: {title}", ""]
        lines += ["| name | kind | unit | per session | meaning |", "|---|---|---|---|---|"]
        for figure in FIGURES:
            if figure.section == section:
                session = "yes" if figure.session else ""
                cells = (f"`{figure.name}`", figure.kind, figure.unit, session, figure.help)
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
