"""The figures and histograms of the table in the text format that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from coli_server.telemetry.histogram import BOUNDS, HistogramSnapshot
from coli_server.telemetry.stat import Value, format_value
from coli_server.telemetry.table import FIGURES, HISTOGRAMS

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_INFO = "coli_info"
# Every second bound of the four in an octave: half the lines, and a quantile is off by a quarter at most.
_SHOWN = range(0, len(BOUNDS), 2)
_LABELS = tuple(f"{BOUNDS[bucket]:.6g}" for bucket in _SHOWN)
_FAMILIES: Mapping[str, Callable[..., Metric]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What was known at one moment, by the names in the table of figures: values and histograms.

    Counters are those since the daemon started: a window of STAT would look like a restart.
    """

    values: Mapping[str, Value]
    histograms: Mapping[str, HistogramSnapshot]


def exposition(snapshot: MetricsSnapshot) -> bytes:
    """All of `snapshot` that the table has a metric for. Takes milliseconds."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*_figures(snapshot.values), *_histograms(snapshot.histograms)]))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _figures(values: Mapping[str, Value]) -> Iterator[Metric]:
    facts = {}
    for figure in FIGURES:
        value = values.get(figure.name)
        if value is None:
            continue
        if figure.prometheus == _INFO:
            facts[figure.name] = format_value(value)
        elif figure.kind in _FAMILIES and figure.prometheus and isinstance(value, int | float):
            yield _FAMILIES[figure.kind](figure.prometheus, _sentence(figure.help), value=value)
    # `coli_info` is how Prometheus tells facts: a metric that is always 1, with the facts as its labels.
    yield InfoMetricFamily("coli", "What serves: version, model and mode.", value=facts)


def _histograms(histograms: Mapping[str, HistogramSnapshot]) -> Iterator[Metric]:
    for histogram in HISTOGRAMS:
        seen = histograms.get(histogram.name)
        if seen is not None:
            below = tuple(accumulate(seen.counts))
            buckets = [(label, float(below[bucket])) for label, bucket in zip(_LABELS, _SHOWN, strict=True)]
            buckets.append(("+Inf", float(below[-1])))
            yield HistogramMetricFamily(
                histogram.prometheus,
                _sentence(f"Seconds {histogram.help}"),
                buckets=buckets,
                sum_value=seen.sum,
            )


def _sentence(help: str) -> str:
    return f"{help[0].upper()}{help[1:]}."
