"""Spans are encoded as OpenTelemetry's SDK encodes the same spans."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from gateway.traces import conventions
from gateway.traces.span_encoding import (
    EncodedTrace,
    SpanEnvelope,
    SpanPlace,
    encode_attributes,
    encode_event,
    encode_head,
    encode_link,
)
from tests.budget import examples

RESOURCE = Resource({"service.name": "tollgate", "service.version": "1"})
SCOPE = InstrumentationScope("tollgate", "2")
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
texts = st.text(st.characters(codec="utf-8"), max_size=150)
ids = st.integers(1, 2**64 - 1)
traces = st.integers(1, 2**128 - 1)
ints = st.integers(-(2**63), 2**63 - 1)
values = st.one_of(texts, st.booleans(), ints, st.floats(allow_nan=False))
attributes = st.dictionaries(texts, values, max_size=3)
times = st.integers(0, 2**64 - 1)
kinds = st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT])
events = st.lists(st.tuples(texts, times, attributes), max_size=2)


@st.composite
def spans(draw: st.DrawFn) -> tuple[ReadableSpan, EncodedTrace]:
    """Draw a span for the SDK, and the same one encoded."""
    trace, span_id, name, kind = draw(traces), draw(ids), draw(texts), draw(kinds)
    begins_ns, ends_ns = draw(times), draw(times)
    state = draw(st.sampled_from(["", "a=1", "a=1,b=2"]))
    parent_id, is_remote = draw(st.one_of(st.just(0), ids)), draw(st.booleans())
    shared, own, noted = draw(attributes), draw(attributes), draw(events)
    own = {key: value for key, value in own.items() if key not in shared}
    linked = draw(st.one_of(st.none(), st.tuples(traces, ids)))
    is_failed = draw(st.booleans())

    def context(span: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(
            trace, span, is_remote, SAMPLED, TraceState.from_header([state]) if state else None
        )

    links = []
    if linked is not None:
        links = [Link(SpanContext(*linked, True, SAMPLED))]
    readable = ReadableSpan(
        name,
        context(span_id),
        context(parent_id, is_remote=is_remote) if parent_id else None,
        RESOURCE,
        shared | own,
        tuple(Event(name, said, at) for name, at, said in noted),
        links,
        kind,
        status=Status(StatusCode.ERROR if is_failed else StatusCode.UNSET),
        start_time=begins_ns,
        end_time=ends_ns,
        instrumentation_scope=SCOPE,
    )
    place = SpanPlace(f"{trace:032x}", state)
    rest = encode_attributes(own) + b"".join(encode_event(*each[:2], each[2]) for each in noted)
    if linked is not None:
        rest += encode_link(f"{linked[0]:032x}", f"{linked[1]:016x}", "")
    head = encode_head(name, kind, shared, is_failed=is_failed)
    encode = place.encode_below_remote if parent_id and is_remote else place.encode
    encoded = encode(span_id, parent_id, begins_ns, ends_ns, head, rest)
    return readable, EncodedTrace(1, encoded)


@settings(max_examples=examples(100))
@given(st.lists(spans(), min_size=1, max_size=2))
def test_a_message_is_what_the_sdk_makes_of_the_same_spans(
    drawn: list[tuple[ReadableSpan, EncodedTrace]],
) -> None:
    message = SpanEnvelope(RESOURCE, SCOPE).message_of([encoded for _, encoded in drawn])
    assert ExportTraceServiceRequest.FromString(message) == encode_spans(
        [readable for readable, _ in drawn]
    )


def test_what_no_protocol_has_a_place_for_is_cut_and_breaks_nothing() -> None:
    head = encode_head("\ud800", SpanKind.SERVER, {"a": 2**64, "b": "\udfff"}, is_failed=False)
    encoded = EncodedTrace(1, SpanPlace("1" * 32).encode(1, 0, 0, 0, head, b""))
    message = SpanEnvelope(RESOURCE, SCOPE).message_of([encoded])
    [span] = ExportTraceServiceRequest.FromString(message).resource_spans[0].scope_spans[0].spans
    large, broken = (each.value for each in span.attributes)
    assert (span.name, large.int_value, broken.string_value) == ("?", 2**63 - 1, "?")


def test_one_module_spells_the_names_of_traces() -> None:
    """A name of a convention that changes is changed there alone."""
    told = {each for each in vars(conventions).values() if isinstance(each, str) and "." in each}
    told = {each for each in told if re.fullmatch(r"(gen_ai|mcp|tollgate|jsonrpc)\.[a-z_.]+", each)}
    assert len(told) > 30
    root = Path(conventions.__file__).parents[2]
    others = [
        path
        for room in ("gateway", "mcp_bridge", "foundation", "billing")
        for path in (root / room).rglob("*.py")
        if path != Path(conventions.__file__)
    ]
    spelled = {
        (path.name, name)
        for path in others
        for name in re.findall(r'"([a-z_]+\.[a-z_.]+)"', path.read_text())
        if name in told
    }
    assert spelled == set()
