"""Each scraper is answered in the format it asks for, and all formats say the same."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from gateway.telemetry.exposition import OPENMETRICS, PROTOBUF, TEXT, negotiated, spans_of
from gateway.telemetry.histograms import FIRST_INDEX, NUM_NATIVE, SCHEMA, ZERO_THRESHOLD
from gateway.telemetry.metrics import Telemetry

NATIVE_SCRAPE = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,"
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1"
    ";q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TTFT = "tollgate_time_to_first_token_seconds"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html, application/xhtml+xml, */*;q=0.8", TEXT),
        (NATIVE_SCRAPE, PROTOBUF),
        (NATIVE_SCRAPE.partition(",")[2], OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.6", TEXT),
        ("application/vnd.google.protobuf;proto=x.Y;encoding=delimited", TEXT),
        ("application/openmetrics-text;q=nonsense", TEXT),
        ("," * 100_000 + "application/openmetrics-text", TEXT),
    ],
)
def test_the_best_format_that_both_know_is_chosen(accept: str, expected: str) -> None:
    assert negotiated(accept) == expected


@pytest.fixture
def telemetry() -> Telemetry:
    made = Telemetry(models=['we"ird\\'])
    made.answered(route="/v1/chat/completions", model='we"ird\\', status="200")
    made.open_calls.set(3)
    for value in (0.0, 0.03, 0.03, 0.5, 99.0):
        made.ttft_of('we"ird\\').observe(value)
    made.ttft_of('we"ird\\').exemplify(0.5, trace=TRACE, at=1790000000.25)
    return made


def test_the_texts_are_read_back(telemetry: Telemetry) -> None:
    plain = telemetry.render().content.decode()
    found = {each.name: each for each in read_text(plain) if "_created" not in each.name}
    assert "# {" not in plain and len(found) > 5
    exposed = telemetry.render("application/openmetrics-text; version=1.0.0")
    assert exposed.media_type == OPENMETRICS
    opened = {each.name: each for each in read_openmetrics(exposed.content.decode())}
    assert {*opened} == {*found}
    [exemplar] = [each.exemplar for each in opened[TTFT].samples if each.exemplar]
    assert (exemplar.labels, exemplar.value) == ({"trace_id": TRACE}, 0.5)
    assert float(exemplar.timestamp) == 1790000000.25
    for name in (TTFT, "tollgate_requests", "tollgate_open_calls"):
        assert {
            (s.name, *sorted(s.labels.items()), s.value)
            for s in opened[name].samples
            if "_created" not in s.name
        } == {
            (s.name, *sorted(s.labels.items()), s.value)
            for s in found[name].samples
            if "_created" not in s.name
        }


def test_protobuf_has_both_kinds_of_buckets(telemetry: Telemetry) -> None:
    exposed = telemetry.render(NATIVE_SCRAPE)
    assert exposed.media_type == PROTOBUF
    families = {}
    for message in delimited(exposed.content):
        fields = dict(fields_of(message))
        families[fields[1].decode()] = (
            fields[3],
            [each for n, each in fields_of(message) if n == 4],
        )
    assert families["tollgate_requests_total"][0] == 0
    assert families["tollgate_open_calls"][0] == 1
    kind, [metric] = families[TTFT]
    assert kind == 4
    labels = [dict(fields_of(each)) for number, each in fields_of(metric) if number == 1]
    assert labels == [{1: b"model", 2: b'we"ird\\'}]
    histogram = dict(fields_of(metric))[7]
    fields = dict(fields_of(histogram))
    assert (fields[1], double(fields[2])) == (5, 99.56)
    assert (fields[5], double(fields[6]), fields[7]) == (SCHEMA << 1, ZERO_THRESHOLD, 1)
    buckets = [dict(fields_of(each)) for number, each in fields_of(histogram) if number == 3]
    assert double(buckets[-1][2]) == float("inf") and buckets[-1][1] == 5
    [at_half] = [each for each in buckets if double(each[2]) == 0.5]
    exemplar = dict(fields_of(at_half[3]))
    assert at_half[1] == 4 and double(exemplar[2]) == 0.5
    assert dict(fields_of(exemplar[1])) == {1: b"trace_id", 2: TRACE.encode()}
    assert dict(fields_of(exemplar[3])) == {1: 1790000000, 2: 250000000}
    spans = [dict(fields_of(each)) for number, each in fields_of(histogram) if number == 12]
    assert [each[2] for each in spans] == [1, 1, 1], "0.03 twice, 0.5, 99"


def test_native_buckets_are_sent_as_runs_and_differences() -> None:
    natives = [0] * (NUM_NATIVE - 1)
    at = -FIRST_INDEX  # index 0
    natives[at - 1 : at + 1], natives[at + 4 : at + 7] = [2, 5], [5, 1, 1]
    assert spans_of(natives) == ([(-1, 2), (3, 3)], [2, 3, 0, -4, 0])
    assert spans_of([0] * 9) == ([], [])


def delimited(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size, at = varint(content, at)
        yield content[at : at + size]
        at += size


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: numbers, doubles as 8 bytes, and bytes."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        if tag & 7 == 0:
            value, at = varint(message, at)
            yield tag >> 3, value
        elif tag & 7 == 1:
            yield tag >> 3, message[at : at + 8]
            at += 8
        else:
            size, at = varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size


def varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def double(packed: bytes) -> float:
    found: float = struct.unpack("<d", packed)[0]
    return found
