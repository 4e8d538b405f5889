"""The histograms of times that the event loop measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from coli_server.telemetry.histogram import Histogram, HistogramSnapshot


@dataclass(frozen=True, slots=True)
class Latencies:
    """Histograms of seconds, by their names in the table of figures. Only the event loop observes."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    request: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)
    decode: Histogram = field(default_factory=Histogram)
    event_loop_lag: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> Mapping[str, HistogramSnapshot]:
        """All of them at this moment, by name."""
        return {item.name: getattr(self, item.name).snapshot() for item in fields(self)}
