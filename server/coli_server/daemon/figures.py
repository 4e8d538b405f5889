"""What STAT tells, from counters that the loop owns and the engine's newest snapshot. Never waits."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from coli_server import __version__
from coli_server.daemon.health import Health
from coli_server.daemon.latency import Latencies
from coli_server.daemon.meters import Meters
from coli_server.daemon.options import layered, policy_of
from coli_server.daemon.scheduler import Scheduler
from coli_server.daemon.sessions import Session, Sessions
from coli_server.engine.api import SYSTEM, EngineSnapshot
from coli_server.engine.store import describe_mode
from coli_server.ranges import ROUTING
from coli_server.settings import SETTINGS, Path, PathOr, Settings
from coli_server.telemetry.counters import Counters
from coli_server.telemetry.histogram import HistogramSnapshot
from coli_server.telemetry.prometheus import MetricsSnapshot
from coli_server.telemetry.stat import Value, counter_values, format_value, render
from coli_server.telemetry.table import FIGURES

Pairs = Iterator[tuple[str, str]]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_COUNTER_NAMES = frozenset(figure.name for figure in FIGURES if figure.kind == "counter")
_PREFETCH = tuple(figure.name for figure in FIGURES if figure.name.startswith("prefetch_"))
# What `STAT sessions` shows of each session; the rest is in `STAT session <id>`.
_SESSION_SUMMARY = ("requests_total", "prompt_tokens_total", "generated_tokens_total", "hit_pct", "swap_pct")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a daemon is: facts that do not change while it runs."""

    model: str
    model_type: str
    started: float


class Figures:
    """Collects values for STAT. `STAT reset` starts a new window: counters and times count from there."""

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        options: Mapping[str, Value],
        *,
        sessions: Sessions,
        scheduler: Scheduler,
        meters: Meters,
        latencies: Latencies,
        health: Health,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._options = options
        self._sessions = sessions
        self._scheduler = scheduler
        self._meters = meters
        self._latencies = latencies
        self._health = health
        self._window = Counters()
        self._system = Counters()
        self._counted: dict[str, Value] = {}
        self._timed: Mapping[str, HistogramSnapshot] = {}

    def reset(self) -> None:
        """Start a new window for everything that STAT shows."""
        snapshot = self._scheduler.snapshot()
        # Requests in progress belong to the new window: there, too, every request has an outcome or goes on.
        self._window = _without_unfinished(_total(snapshot) + self._sessions.outcomes())
        self._system = snapshot.sessions.get(SYSTEM, Counters())
        for session in self._sessions:
            session.window = _without_unfinished(_of_session(snapshot, session))
        self._counted = {
            name: v for name, v in self._plain_values(snapshot).items() if name in _COUNTER_NAMES
        }
        # What is being prefetched now has its outcome in the new window, so it is issued there, too.
        self._counted["prefetch_issued"] -= snapshot.prefetch_in_flight  # type: ignore[operator]
        self._timed = self._latencies.snapshot()

    def metrics(self) -> MetricsSnapshot:
        """Everything since the daemon started, for Prometheus."""
        snapshot = self._scheduler.snapshot()
        counters = _total(snapshot) + self._sessions.outcomes()
        values = self._plain_values(snapshot) | self._of_counters(counters, self._options)
        times = dict(self._latencies.snapshot())
        times |= {"expert_load": snapshot.expert_load, "expert_wait": snapshot.expert_wait}
        return MetricsSnapshot(values, times)

    def everything(self, section: str = "all") -> Pairs:
        """The daemon's figures, all or one section of them."""
        snapshot = self._scheduler.snapshot()
        values = self._plain_values(snapshot)
        for name, before in self._counted.items():
            values[name] -= before  # type: ignore[operator]
        counters = _total(snapshot) + self._sessions.outcomes() - self._window
        values |= self._of_counters(counters, self._options)
        return render(values, section)

    def session(self, session: Session) -> Pairs:
        """One session's figures and its routing options."""
        return render(self._session_values(self._scheduler.snapshot(), session), "session")

    def system(self) -> Pairs:
        """The figures of work that belongs to no session: pins and prefetch."""
        counters = self._scheduler.snapshot().sessions.get(SYSTEM, Counters()) - self._system
        return render(self._of_counters(counters, self._options), "session")

    def sessions(self) -> Pairs:
        """A few figures of each session, named `<id>:<figure>`."""
        snapshot = self._scheduler.snapshot()
        for session in self._sessions:
            values = self._session_values(snapshot, session)
            yield f"{session.name}:connections", str(session.connections)
            yield f"{session.name}:requests_current", str(len(session.requests))
            shown = {name: values[name] for name in _SESSION_SUMMARY}
            yield from ((f"{session.name}:{name}", word) for name, word in render(shown))

    def settings(self, *, paths: bool) -> Pairs:
        """Every setting of the daemon; what names a file or folder only with `paths`."""
        for name, word in self._settings.words().items():
            if paths or not isinstance(SETTINGS[name].accepts, Path | PathOr):
                yield name, format_value(word)

    def _session_values(self, snapshot: EngineSnapshot, session: Session) -> dict[str, Value]:
        counters = _of_session(snapshot, session) - session.window
        return self._of_counters(counters, layered(session.options, self._options))

    def _of_counters(self, counters: Counters, options: Mapping[str, Value]) -> dict[str, Value]:
        # With stock routing the meters read 100 % and 0; only ROUTE_AGREE=0 silences them.
        meters = options["route_agree"] is not False
        # The figure route_agree is the measured agreement, not the option of that name.
        routing = {name: options[name] for name in ROUTING if name != "route_agree"}
        return {**counter_values(counters, agree=meters), **routing}

    def _plain_values(self, snapshot: EngineSnapshot) -> dict[str, Value]:
        """Everything global that is not made from `Counters`; counters since the daemon started."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_seconds": time.monotonic() - self._identity.started,
            "model": self._identity.model,
            "model_type": self._identity.model_type,
            "mode": describe_mode(
                policy_of(self._options),
                pilot=self._settings.pilot,
                activations=self._settings.activations,
            ),
            "ready": self._health.ready,
            "draining": self._scheduler.draining,
            "sessions_current": len(self._sessions),
            "sessions_total": self._sessions.total,
            "sessions_evicted_total": self._sessions.evicted,
            "sessions_expired_total": self._sessions.expired,
            "sessions_refused_total": self._sessions.refused,
            "busy_queue_total": self._scheduler.refused,
            "queue_timeouts_total": self._scheduler.overdue,
            "engine_stalled": self._scheduler.stalled,
            "requests_running": self._scheduler.running,
            "requests_waiting": self._scheduler.waiting,
            "ram_bytes": self._settings.ram,
            "loop_tasks": len(asyncio.all_tasks()),
            "rss_bytes": rss_bytes(),
            "pilot": self._settings.pilot,
            **{name: getattr(snapshot, name) for name in _PREFETCH},
            **{item.name: getattr(self._meters, item.name) for item in fields(self._meters)},
            "load_errors": snapshot.load_errors,
            "load_seconds": snapshot.load_seconds,
            "wait_seconds": snapshot.wait_seconds,
            "evictions": snapshot.evictions,
            "model_experts": snapshot.experts,
            "layers_resident": ",".join(map(str, snapshot.layers_resident)),
            "cache_slots_per_layer": snapshot.slots_per_layer,
            "cache_bytes": snapshot.cache_bytes,
            "cache_capacity_bytes": snapshot.cache_capacity_bytes,
            "pinned_experts": snapshot.pinned_experts,
            "kv_bytes": snapshot.kv_bytes,
            "kv_capacity_bytes": snapshot.kv_capacity_bytes,
            "kv_evictions": snapshot.kv_evictions,
            "route_distinct_min": snapshot.layer_use.distinct_experts_min,
            "route_distinct_median": snapshot.layer_use.distinct_experts_median,
            "route_swap_run_max": snapshot.layer_use.longest_swap_run,
            **self._quantiles(),
        }

    def _quantiles(self) -> dict[str, Value]:
        now = self._latencies.snapshot()
        window = {name: seen - self._timed[name] if self._timed else seen for name, seen in now.items()}
        ttft, itl = window["time_to_first_token"], window["inter_token_latency"]
        return {
            "ttft_ms_p50": ttft.quantile(0.5) * 1000,
            "ttft_ms_p99": ttft.quantile(0.99) * 1000,
            "itl_ms_p50": itl.quantile(0.5) * 1000,
            "itl_ms_p99": itl.quantile(0.99) * 1000,
            "event_loop_lag_ms_p99": window["event_loop_lag"].quantile(0.99) * 1000,
        }


def starting(started: float) -> MetricsSnapshot:
    """The metrics of a daemon that is still loading its model, since `started`."""
    uptime = time.monotonic() - started
    values: dict[str, Value] = {
        "version": __version__,
        "uptime_seconds": uptime,
        "ready": False,
        "rss_bytes": rss_bytes(),
    }
    return MetricsSnapshot(values, {})


# Opened once: figures can be told when no file can be opened any more.
_STATM = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115


class _Resident:
    """Memory of this process that is in RAM, read at most every `SECONDS`.

    A read lets go of the interpreter's lock, and then an answer waits until the engine gives it back.
    """

    SECONDS = 0.5

    def __init__(self) -> None:
        self._at = -math.inf
        self._bytes = 0

    def read(self) -> int:
        now = time.monotonic()
        if now - self._at >= self.SECONDS:
            self._bytes = int(os.pread(_STATM.fileno(), 128, 0).split()[1]) * _PAGE
            self._at = now
        return self._bytes


_RESIDENT = _Resident()


def rss_bytes() -> int:
    """Memory of this process that is in RAM, in bytes, half a second ago at most."""
    return _RESIDENT.read()


def _total(snapshot: EngineSnapshot) -> Counters:
    """The engine's half of the global counters."""
    total = snapshot.closed.copy()
    for counters in snapshot.sessions.values():
        total.add(counters)
    return total


def _of_session(snapshot: EngineSnapshot, session: Session) -> Counters:
    return snapshot.sessions.get(session.key, Counters()) + session.outcomes


def _without_unfinished(counters: Counters) -> Counters:
    """The same, with only those requests counted that have ended."""
    ended = counters.copy()
    ended.requests_total = sum(
        getattr(counters, item.name)
        for item in fields(counters)
        if item.name.startswith("requests_") and item.name != "requests_total"
    )
    return ended
