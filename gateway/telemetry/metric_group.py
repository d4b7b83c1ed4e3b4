"""Makes the metrics of one process, in groups as docs/metrics.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.telemetry.histograms import Histogram, HistogramMemory

GaugeMode = Literal["livesum", "livemin", "livemax", "mostrecent"]


class MetricDescription(NamedTuple):
    """Describes a metric to people (docs/metrics.md). `do`: what to do about it."""

    group: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    do: str

    @property
    def shown_name(self) -> str:
        """The name of its series; a histogram has `_bucket`, `_sum` and `_count` behind it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


class MadeMetrics(NamedTuple):
    """All metrics of one process. `memory`: what its histograms observe into; `listed`: each metric
    as it is described to people."""

    memory: HistogramMemory
    registry: CollectorRegistry
    histograms: list[Histogram]
    listed: list[MetricDescription]


class MetricGroup:
    """Makes metrics of one process and lists them, as a group of docs/metrics.md. Workers' gauges
    become one: by default each knows its own part, and the whole is their sum."""

    def __init__(self, name: str, made: MadeMetrics) -> None:
        self._name, self._made = name, made

    def counter(self, name: str, text: str, *labels: str, do: str) -> Counter:
        listed = self._list(name, "counter", text, labels, do)
        return Counter(listed.name, text, labels, registry=self._made.registry)

    def histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float], do: str
    ) -> Histogram:
        listed = self._list(name, "histogram", text, labels, do)
        made = Histogram(self._made.memory, listed.name, text, labels, buckets)
        self._made.histograms.append(made)
        return made

    def gauge(
        self, name: str, text: str, *labels: str, do: str, mode: GaugeMode = "livesum"
    ) -> Gauge:
        listed = self._list(name, "gauge", text, labels, do)
        registry = self._made.registry
        return Gauge(listed.name, text, labels, registry=registry, multiprocess_mode=mode)

    def describe(self, name: str, text: str, *labels: str, do: str) -> MetricDescription:
        """List a counter that is kept elsewhere."""
        return self._list(name, "counter", text, labels, do)

    def _list(
        self, name: str, kind: str, text: str, labels: tuple[str, ...], do: str
    ) -> MetricDescription:
        listed = MetricDescription(self._name, f"tollgate_{name}", kind, labels, text, do)
        self._made.listed.append(listed)
        return listed
