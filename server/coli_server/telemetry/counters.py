"""Raw counters: plain numbers that only grow. Ratios are derived when they are read."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """What one request, one session or the whole daemon has done so far.

    Engine-owned fields are written by the engine thread only, request outcomes by the event loop only;
    the two halves live in two `Counters` values that `+` joins when somebody reads them.
    Definitions: routing counters as in docs/STAT.md; seconds are wall-clock time.
    """

    # written by the engine thread
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    decode_steps: int = 0  # tokens computed one at a time: a generation of n tokens has n - 1
    decode_seconds: float = 0.0  # from a request's first token to its last
    route_slots: int = 0
    route_swaps: int = 0
    route_rows: int = 0  # (token, layer) pairs whose agreement and KL were measured
    route_kl_sum: float = 0.0  # nats, over route_rows
    route_mass_sum: float = 0.0  # over route_rows
    lookups: int = 0
    hits_pin: int = 0
    hits_lru: int = 0
    misses: int = 0
    prefill_lookups: int = 0
    prefill_hits_pin: int = 0
    prefill_hits_lru: int = 0
    prefill_misses: int = 0
    loads: int = 0
    load_bytes: int = 0
    # written by the event loop
    requests_total: int = 0
    requests_stop_total: int = 0
    requests_length_total: int = 0
    requests_cancelled_total: int = 0
    requests_deadline_total: int = 0
    requests_drained_total: int = 0
    requests_error_total: int = 0

    def add(self, other: Counters) -> None:
        """Add every counter of `other` to this one, in place."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def copy(self) -> Counters:
        return Counters(*(getattr(self, name) for name in _NAMES))

    def __add__(self, other: Counters) -> Counters:
        total = self.copy()
        total.add(other)
        return total

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, name) - getattr(other, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Counters))


def percent(part: float, whole: float, *, empty: float = 0.0) -> float:
    """`100 * part / whole`, or `empty` when there is nothing to divide by."""
    return 100.0 * part / whole if whole else empty


def swap_pct(counters: Counters) -> float:
    return percent(counters.route_swaps, counters.route_slots)


def hit_pct(counters: Counters) -> float:
    return percent(counters.hits_pin + counters.hits_lru, counters.lookups)


def route_agree(counters: Counters) -> float:
    """Share of the router's own choices that were run, in percent; 100 when nothing was routed."""
    return 100.0 - swap_pct(counters)


def route_kl(counters: Counters) -> float:
    """Mean KL divergence in nats over the measured (token, layer) pairs; 0 when there are none."""
    return counters.route_kl_sum / counters.route_rows if counters.route_rows else 0.0


def route_mass_kept(counters: Counters) -> float:
    """Mean share of the true experts' gate mass that the chosen ones hold; 1 when nothing was measured."""
    return counters.route_mass_sum / counters.route_rows if counters.route_rows else 1.0


def tok_s(counters: Counters) -> float:
    """Decoded tokens per second: a request's first token comes from its prompt and is not counted."""
    return counters.decode_steps / counters.decode_seconds if counters.decode_seconds else 0.0
