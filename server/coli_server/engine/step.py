"""One step of the engine: which tokens of which sequences it computes, and what it measures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coli_server.engine.kv import KvCache
from coli_server.routing import RoutePolicy, Selection, SessionResidency, SpanMean
from coli_server.telemetry.counters import Counters

STOCK = RoutePolicy(mode="off")
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RouteState:
    """What cache-aware routing remembers of one request: the logical LRU of session scope, and the running
    span of cache-prior. Either is None where the policy does not use it."""

    residency: SessionResidency | None = None
    span: SpanMean | None = None

    @classmethod
    def empty(cls, policy: RoutePolicy, layers: int, experts: int, k: int) -> RouteState:
        """The state at the beginning of a request; `layers` and `experts` are those of the MoE layers."""
        residency = span = None
        if policy.active and policy.scope == "session":
            residency = SessionResidency.empty(layers, experts, policy.session_capacity(k, experts))
        if policy.mode == "cache-prior":
            span = SpanMean.empty(layers)
        return cls(residency, span)

    def copy(self) -> RouteState:
        return RouteState(
            None if self.residency is None else self.residency.copy(),
            None if self.span is None else self.span.copy(),
        )


@dataclass(slots=True)
class Sequence:
    """One running request as the model sees it: its KV, its routing policy and state, its counters."""

    kv: KvCache
    policy: RoutePolicy
    route: RouteState = RouteState()
    counters: Counters = field(default_factory=Counters)

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.kv.length


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in one step.

    `prompt`: they are prompt tokens; `length`: the length of the text that they belong to, for rotary
    types that look at it; `want`: which of their logits are needed.
    """

    sequence: Sequence
    ids: tuple[int, ...]
    prompt: bool
    length: int
    want: Literal["none", "last", "all"] = "last"

    @property
    def policy(self) -> RoutePolicy:
        """The policy that routes these tokens: stock for a prompt, unless it is routed too."""
        policy = self.sequence.policy
        return policy if not self.prompt or policy.prefill else STOCK

    @property
    def wanted(self) -> int:
        """How many rows of logits are needed."""
        return {"none": 0, "last": 1, "all": len(self.ids)}[self.want]

    @property
    def counted(self) -> bool:
        """Whether the tokens belong to the meters' window (docs/CACHE_ROUTE.md, meters)."""
        return not self.prompt or (self.sequence.policy.active and self.sequence.policy.prefill)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step that have the same policy, so that one call of `routing.select` routes them.

    `members` are their spans, each with the number of its first row inside the group.
    """

    policy: RoutePolicy
    rows: NDArray[np.intp] | slice
    members: tuple[tuple[int, Span], ...]
    counted: NDArray[np.intp] | slice | None  # rows of the group inside the meters' window; None: no row

    def residency(self, slot: int, physical: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The residency that the policy sees in MoE layer `slot`: bool [experts] or [rows, experts].

        In session scope a span is one token (`Engine` sees to it): each sees its predecessors' choices.
        """
        if not self.policy.active or self.policy.scope == "shared":
            return physical
        return np.stack([_residency_of(span).row(slot) for _, span in self.members])

    def touch(self, slot: int, chosen: I32) -> None:
        """Move the logical LRUs by the choices of MoE layer `slot`, int32 [rows, k]."""
        if self.policy.active and self.policy.scope == "session":
            for row, span in self.members:
                _residency_of(span).touch(slot, chosen[row])

    def spans(self, slot: int, scores: F32, logits: F32 | None) -> NDArray[np.float64] | None:
        """The running span of cache-prior as every row sees it, float64 [rows]; None for other policies."""
        if self.policy.mode != "cache-prior":
            return None
        means = []
        for row, span in self.members:
            rows = slice(row, row + len(span.ids))
            mean = span.sequence.route.span
            assert mean is not None
            means.append(mean.observe(slot, scores[rows], None if logits is None else logits[rows]))
        return np.concatenate(means)


def _residency_of(span: Span) -> SessionResidency:
    residency = span.sequence.route.residency
    assert residency is not None
    assert len(span.ids) == 1
    return residency


class Step:
    """The rows of one step, in span order, and the figures that its layers add up row by row.

    Attributes: `ids`, `positions`, `lengths` int32 [rows]; `first[i]` is the row of span i's first token.
    """

    def __init__(self, spans: Seq[Span]) -> None:
        self.spans = tuple(spans)
        counts = [len(span.ids) for span in spans]
        starts = [span.sequence.position for span in spans]
        self.first = [0, *np.cumsum(counts).tolist()]
        self.rows = int(self.first[-1])
        self.ids: I32 = np.fromiter((i for span in spans for i in span.ids), np.int32, self.rows)
        self.positions: I32 = np.concatenate(
            [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]
        )
        self.lengths: I32 = np.repeat(np.array([span.length for span in spans], np.int32), counts)
        self.starts = starts
        self.runs = self._runs(counts)
        # Where the caches of each row's sequence begin: int64 [layers, rows, 2].
        self.bases: NDArray[np.int64] = np.repeat(
            np.stack([span.sequence.kv.bases for span in spans], axis=1), counts, axis=1
        )
        self.groups = self._group()
        self._selections: dict[int, list[Selection]] = {}  # of every group, one a layer
        self.layers = 0
        # Positions that sparse attention may see, per span: what the last full indexer selected.
        self.selected: list[I32 | None] = [None] * len(self.spans)
        self.found = np.zeros((self.rows, 3), np.int64)  # lookups that were absent, in the LRU, pinned
        self.loads = np.zeros((self.rows, 2), np.int64)  # physical reads and their bytes

    def _runs(self, counts: Seq[int]) -> tuple[tuple[int, int, bool], ...]:
        """Rows that attend in one launch, first and end, and whether they are all of one sequence.

        Spans of one token, next to each other, share a run; every longer one has its own.
        """
        runs: list[tuple[int, int, bool]] = []
        for i, count in enumerate(counts):
            first, end = self.first[i], self.first[i + 1]
            if count == 1 and runs and not runs[-1][2]:
                runs[-1] = (runs[-1][0], end, False)
            else:
                runs.append((first, end, count > 1))
        return tuple(runs)

    def _group(self) -> tuple[RowGroup, ...]:
        by_policy: dict[RoutePolicy, list[int]] = {}
        for i, span in enumerate(self.spans):
            by_policy.setdefault(span.policy, []).append(i)
        return tuple(self._row_group(policy, indices) for policy, indices in by_policy.items())

    def _row_group(self, policy: RoutePolicy, indices: list[int]) -> RowGroup:
        members, counted, at = [], [], 0
        for i in indices:
            span = self.spans[i]
            members.append((at, span))
            if span.counted:
                counted.append(np.arange(at, at + len(span.ids)))
            at += len(span.ids)
        window: NDArray[np.intp] | slice | None = slice(0, at)
        if len(counted) < len(members):
            window = np.concatenate(counted) if counted else None
        rows: NDArray[np.intp] | slice = slice(0, self.rows)
        if len(indices) < len(self.spans):
            rows = np.concatenate([np.arange(self.first[i], self.first[i + 1]) for i in indices])
        return RowGroup(policy, rows, tuple(members), window)

    def record(self, group: RowGroup, selection: Selection) -> None:
        """Keep what `selection` measured for the rows of `group` in one layer."""
        self._selections.setdefault(id(group), []).append(selection)

    def finish(self) -> None:
        """Fold the figures into the counters of each sequence, and declare their KV valid."""
        for group in self.groups:
            self._fold_routing(group)
        for i, span in enumerate(self.spans):
            self._fold_lookups(span, slice(self.first[i], self.first[i + 1]))
            stock = not span.policy.active
            span.sequence.kv.append(span.ids, stock=stock)
        self.attribute_loads()

    def attribute_loads(self) -> None:
        """Add the physical reads to the counters of the sequences that caused them.

        `finish` does it; of a step that failed nothing else is counted, but its reads took place.
        """
        for i, span in enumerate(self.spans):
            loads, nbytes = (int(n) for n in self.loads[self.first[i] : self.first[i + 1]].sum(axis=0))
            span.sequence.counters.loads += loads
            span.sequence.counters.load_bytes += nbytes

    def _fold_routing(self, group: RowGroup) -> None:
        """Sum what routing measured of a group's counted rows over all layers."""
        selections = self._selections.get(id(group), [])
        measured = selections if group.policy.active or group.policy.meters else []
        # Of every row, over all layers; the stock router swaps nothing.
        swaps = sum((selection.swaps for selection in measured), np.zeros(1, np.int64))
        kl = sum((selection.kl for selection in measured), np.zeros(1))
        mass = sum((selection.mass_kept for selection in measured), np.zeros(1))
        slots = sum(selection.experts.shape[1] for selection in selections)
        for first, span in group.members:
            if not span.counted:
                continue
            counters, rows = span.sequence.counters, slice(first, first + len(span.ids))
            counters.route_slots += slots * len(span.ids)
            counters.route_swaps += int(swaps[rows].sum())
            if span.sequence.policy.meters:
                counters.route_rows += self.layers * len(span.ids)
                counters.route_kl_sum += float(kl[rows].sum())
                counters.route_mass_sum += float(mass[rows].sum())

    def _fold_lookups(self, span: Span, rows: slice) -> None:
        counters = span.sequence.counters
        absent, lru, pinned = (int(n) for n in self.found[rows].sum(axis=0))
        if span.counted:
            counters.lookups += absent + lru + pinned
            counters.hits_pin += pinned
            counters.hits_lru += lru
            counters.misses += absent
        else:
            counters.prefill_lookups += absent + lru + pinned
            counters.prefill_hits_pin += pinned
            counters.prefill_hits_lru += lru
            counters.prefill_misses += absent
