"""What must hold of a daemon's figures once it is quiet again after a load, and what must be as before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

from coli_server.bench.load import Link, LoadError, Tally

Figures = Mapping[str, str]

OUTCOMES = ("stop", "length", "cancelled", "deadline", "drained", "error")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds. Descriptors and threads only where its `/proc` can be read: on this machine."""

    descriptors: int | None
    threads: int | None
    rss_bytes: int
    loop_tasks: int
    sessions: int
    connections: int
    kv_bytes: int

    @classmethod
    def of(cls, figures: Figures) -> Footprint:
        pid = figures["pid"]
        return cls(
            descriptors=_entries(f"/proc/{pid}/fd"),
            threads=_entries(f"/proc/{pid}/task"),
            rss_bytes=int(figures["rss_bytes"]),
            loop_tasks=int(figures["loop_tasks"]),
            sessions=int(figures["sessions_current"]),
            connections=int(figures["connections_current"]),
            kv_bytes=int(figures["kv_bytes"]),
        )


async def quiet(link: Link, *, connections: int = 1, seconds: float = 60.0) -> dict[str, str]:
    """All figures once nothing runs and only `connections` are open. LoadError when that does not come."""
    figures: dict[str, str] = {}
    held: list[str] = []
    for _ in range(round(seconds / 0.25)):
        figures = await link.stat()
        busy = int(figures["requests_running"]) + int(figures["requests_waiting"])
        earlier, held = held, [figures[name] for name in ("sessions_current", "loop_tasks", "kv_bytes")]
        # The engine drops the caches of a session a moment after its last connection has gone.
        if held == earlier and not busy and int(figures["connections_current"]) <= connections:
            return figures
        await asyncio.sleep(0.25)
    raise LoadError(
        f"the daemon is not quiet after {seconds:g} s: {figures['requests_running']} running, "
        f"{figures['requests_waiting']} waiting, {figures['connections_current']} connections"
    )


def broken_invariants(figures: Figures) -> list[str]:
    """Figures of one moment that do not add up, in words."""
    value = {name: float(word) for name, word in figures.items() if _is_number(word)}
    wrong: list[str] = []

    def same(what: str, left: float, right: float) -> None:
        if abs(left - right) > 1e-3:
            wrong.append(f"{what}: {left:g} is not {right:g}")

    outcomes = sum(value[f"requests_{name}_total"] for name in OUTCOMES)
    alive = value["requests_running"] + value["requests_waiting"]
    same("requests_total = outcomes + running + waiting", value["requests_total"], outcomes + alive)
    hits = value["hits_pin"] + value["hits_lru"]
    same("lookups = hits_pin + hits_lru + misses", value["lookups"], hits + value["misses"])
    hits = value["prefill_hits_pin"] + value["prefill_hits_lru"]
    same("the same of prompts", value["prefill_lookups"], hits + value["prefill_misses"])
    ends = ("used", "late", "wasted", "failed", "in_flight")
    same(
        "prefetch_issued = used + late + wasted + failed + in flight",
        value["prefetch_issued"],
        sum(value[f"prefetch_{name}"] for name in ends),
    )
    if "route_agree" in value:
        same("route_agree = 100 - swap_pct", value["route_agree"], 100 - value["swap_pct"])
    return wrong


def broken_accounts(before: Figures, after: Figures, tally: Tally) -> list[str]:
    """Where the daemon's counters and the clients' own do not agree, in words.

    A request that its client left may or may not have been acknowledged in time for the client to see it.
    """
    wrong = [
        f"{name} went down from {before[name]} to {after[name]}"
        for name in after
        if name.endswith("_total") and float(after[name]) < float(before.get(name, "0"))
    ]
    counted = int(after["requests_total"]) - int(before["requests_total"])
    seen = [sample for sample in tally.samples if sample.acknowledged]
    unsure = sum(sample.ended == "vanished" and not sample.acknowledged for sample in tally.samples)
    if not len(seen) <= counted <= len(seen) + unsure:
        wrong.append(
            f"requests_total grew by {counted}; clients saw {len(seen)} ACKs and left {unsure} early"
        )
    lost = sum(sample.ended == "lost" for sample in tally.samples)
    if lost:
        wrong.append(f"{lost} requests have no last line")
    if tally.strays:
        wrong.append(f"{tally.strays} lines came that nothing had asked for")
    return wrong


def _entries(folder: str) -> int | None:
    try:
        return len(os.listdir(folder))
    except OSError:
        return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
