"""Writes metrics as Prometheus asks for them: its text, OpenMetrics with exemplars, or protobuf
with native histograms, which no text has.

The formats: prometheus.io/docs/instrumenting/exposition_formats, OpenMetrics 1.0, and
`io/prometheus/client/metrics.proto` of prometheus/client_model, each message behind its length.
Prometheus asks for protobuf where it is to keep native histograms, and otherwise for OpenMetrics.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from gateway.telemetry.histograms import (
    FIRST_INDEX,
    SCHEMA,
    ZERO_THRESHOLD,
    Exemplar,
    HistogramFamily,
    HistogramSeries,
)

TEXT = "text/plain; version=0.0.4"
"""Prometheus' text format; Litestar adds the charset to each `text/`."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROTOBUF = (
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)
MAX_ACCEPT_CHARS = 2048
COUNTER, GAUGE, HISTOGRAM = 0, 1, 4
"""`MetricType` of the protobuf format."""
KINDS = {"counter": COUNTER, "gauge": GAUGE}
VARINT, I64, BYTES = 0, 1, 2
"""Wire types of protobuf."""


def media(content_type: str) -> str:
    """Return a media type without its parameters."""
    return content_type.partition(";")[0]


class Exposition(NamedTuple):
    content: bytes
    media_type: str


class Measurements(NamedTuple):
    """All metrics of an installation's workers on one host, at one moment."""

    metrics: Sequence[Metric]
    """Counters and gauges."""
    histograms: Sequence[HistogramFamily]


def negotiated(accept: str) -> str:
    """Return the media type of the format that an `Accept` header likes best; text where it knows
    none."""
    best, best_quality = TEXT, 0.0
    for each in accept[:MAX_ACCEPT_CHARS].split(","):
        name, *parameters = (part.strip().lower() for part in each.split(";"))
        given = dict(one.split("=", 1) for one in parameters if "=" in one)
        found = _format(name, given)
        quality = _quality(given.get("q", "1"))
        if found is not None and quality > best_quality:
            best, best_quality = found, quality
    return best


def _format(name: str, parameters: Mapping[str, str]) -> str | None:
    if name == "application/openmetrics-text":
        return OPENMETRICS if parameters.get("version", "1.0.0") == "1.0.0" else None
    if name == "application/vnd.google.protobuf":
        wanted = parameters.get("encoding"), parameters.get("proto", "").rpartition(".")[2]
        return PROTOBUF if wanted == ("delimited", "metricfamily") else None
    return TEXT if name in ("text/plain", "text/*", "*/*") else None


def _quality(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        return 0.0


# Text, written here: prometheus-client takes 26 microseconds for a line.


def to_text(measured: Measurements) -> bytes:
    lines: list[str] = []
    for metric in measured.metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        lines += _metric_lines(metric, name)
    lines += _histogram_lines(measured.histograms, _no_exemplar)
    return "".join(f"{line}\n" for line in lines).encode()


def to_openmetrics(measured: Measurements) -> bytes:
    lines: list[str] = []
    for metric in measured.metrics:
        lines += _metric_lines(metric, metric.name)
    lines += _histogram_lines(measured.histograms, _written_exemplar)
    return "".join(f"{line}\n" for line in (*lines, "# EOF")).encode()


def _metric_lines(metric: Metric, name: str) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(metric.documentation)}"
    yield f"# TYPE {name} {metric.type}"
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue  # when this process first counted it, which is no news of all of them
        labels = ",".join(sorted(_pairs(sample.labels.items())))
        braced = f"{{{labels}}}" if labels else ""
        yield f"{sample.name}{braced} {floatToGoString(sample.value)}"


def _histogram_lines(
    families: Sequence[HistogramFamily], written: Callable[[Exemplar | None], str]
) -> list[str]:
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} histogram")
        bounds = [*map(floatToGoString, family.bounds), "+Inf"]
        for series in family.series:
            pairs = sorted(_pairs(zip(family.label_names, series.labels, strict=True)))
            labels = ",".join(pairs)
            before = "".join(f"{each}," for each in pairs if each < "le=")
            after = "".join(f",{each}" for each in pairs if each > "le=")
            start = f'{family.name}_bucket{{{before}le="'
            lines += [
                f'{start}{bound}"{after}}} {count}.0{written(exemplar)}'
                for bound, count, exemplar in zip(
                    bounds, accumulate(series.counts), series.exemplars, strict=True
                )
            ]
            braced = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}_count{braced} {series.count}.0")
            lines.append(f"{family.name}_sum{braced} {series.total!r}")
    return lines


def _pairs(labels: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in labels:
        quoted = _escaped(value).replace('"', r"\"")
        yield f'{name}="{quoted}"'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _no_exemplar(_: Exemplar | None) -> str:
    return ""


def _written_exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    return f' # {{trace_id="{exemplar.trace}"}} {exemplar.value!r} {exemplar.at:.3f}'


def to_metric(family: HistogramFamily) -> Metric:
    """Return a histogram as prometheus-client has it."""
    metric = Metric(family.name, family.help, "histogram")
    bounds = [*map(floatToGoString, family.bounds), "+Inf"]
    for series in family.series:
        labels = dict(zip(family.label_names, series.labels, strict=True))
        for bound, count in zip(bounds, accumulate(series.counts), strict=True):
            metric.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
        metric.add_sample(f"{family.name}_count", labels, series.count)
        metric.add_sample(f"{family.name}_sum", labels, series.total)
    return metric


# Protobuf, written by hand: seven messages of numbers and texts need no library.


def to_protobuf(measured: Measurements) -> bytes:
    families = [_metric_family(each) for each in measured.metrics if each.type in KINDS]
    families += [_histogram_family(each) for each in measured.histograms if each.series]
    return b"".join(_varint(len(each)) + each for each in families)


def _metric_family(metric: Metric) -> bytes:
    kind, parts = KINDS[metric.type], []
    name = f"{metric.name}_total" if kind == COUNTER else metric.name
    for sample in metric.samples:
        if sample.name != name:
            continue  # `_created`, which these messages have elsewhere
        labels = b"".join(_label(*each) for each in sample.labels.items())
        value = _message(3 if kind == COUNTER else 2, _double(1, sample.value))
        parts.append(_message(4, labels + value))
    return _family_head(name, metric.documentation, kind) + b"".join(parts)


def _histogram_family(family: HistogramFamily) -> bytes:
    parts = [_family_head(family.name, family.help, HISTOGRAM)]
    for series in family.series:
        labels = b"".join(map(_label, family.label_names, series.labels))
        parts.append(_message(4, labels + _message(7, _histogram(family, series))))
    return b"".join(parts)


def _histogram(family: HistogramFamily, series: HistogramSeries) -> bytes:
    bounds = (*family.bounds, float("inf"))
    classic = [
        _message(3, _integer(1, count) + _double(2, bound) + _exemplar(exemplar))
        for bound, count, exemplar in zip(
            bounds, accumulate(series.counts), series.exemplars, strict=True
        )
    ]
    zeros, *natives = series.natives
    spans, deltas = spans_of(natives)
    return b"".join(
        (
            _integer(1, series.count),
            _double(2, series.total),
            *classic,
            _integer(5, _zigzag(SCHEMA)),
            _double(6, ZERO_THRESHOLD),
            _integer(7, zeros),
            *(_message(12, _integer(1, _zigzag(gap)) + _integer(2, size)) for gap, size in spans),
            _message(13, b"".join(_varint(_zigzag(each)) for each in deltas)) if deltas else b"",
        )
    )


def spans_of(natives: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return native buckets as they are sent: runs of filled ones, each by its distance from the
    end of the one before (the first from index 0) and its length, and the counts as differences."""
    spans: list[tuple[int, int]] = []
    deltas: list[int] = []
    end = before = 0
    for index, count in enumerate(natives, start=FIRST_INDEX):
        if not count:
            continue
        if spans and index == end:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((index - end, 1))
        deltas.append(count - before)
        end, before = index + 1, count
    return spans, deltas


def _exemplar(exemplar: Exemplar | None) -> bytes:
    if exemplar is None:
        return b""
    seconds = int(exemplar.at)
    at = _integer(1, seconds) + _integer(2, int((exemplar.at - seconds) * 1e9))
    content = _label("trace_id", exemplar.trace) + _double(2, exemplar.value) + _message(3, at)
    return _message(3, content)


def _family_head(name: str, help_text: str, kind: int) -> bytes:
    head = _message(1, name.encode()) + _message(2, help_text.encode())
    return head + _tag(3, VARINT) + _varint(kind)


def _label(name: str, value: str) -> bytes:
    return _message(1, _message(1, name.encode()) + _message(2, value.encode()))


def _message(number: int, content: bytes) -> bytes:
    return _tag(number, BYTES) + _varint(len(content)) + content


def _integer(number: int, value: int) -> bytes:
    return _tag(number, VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _tag(number, I64) + struct.pack("<d", value)


def _tag(number: int, wire_type: int) -> bytes:
    return bytes((number << 3 | wire_type,))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


WRITERS: Mapping[str, Callable[[Measurements], bytes]] = {
    TEXT: to_text,
    OPENMETRICS: to_openmetrics,
    PROTOBUF: to_protobuf,
}
