"""Encodes spans as OTLP has them: the messages of `opentelemetry/proto/trace/v1/trace.proto`.

The objects and messages of OpenTelemetry's SDK take 20 microseconds a span of the interpreter that
answers requests, and most of a span is the same in every request. So what repeats is encoded once,
as a head, and a span is a head with its ids and times. A test compares the bytes with what the SDK
makes of the same spans.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanKind

Value = str | int | float | bool
Attributes = dict[str, Value]

# The key of each field: its number and its wire type.
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # with their lengths
_TRACE_STATE, _NAME, _KIND = b"\x1a", b"\x2a", b"\x30"
_START, _END = 0x39, 0x41
_ATTRIBUTES, _EVENTS, _LINKS = b"\x4a", b"\x5a", b"\x6a"
_FINE, _FAILED = b"\x7a\x00", b"\x7a\x02\x18\x02"
"""`Status`: nothing, and STATUS_CODE_ERROR."""
_FLAGS = b"\x85\x01"
_KNOWS_IF_REMOTE, _IS_REMOTE = 0x100, 0x200
"""`SpanFlags`: whether the parent, or what is linked to, is elsewhere."""
_SPANS = b"\x12"
"""`ScopeSpans.spans`."""

_IDS = struct.Struct(">2s16s2sQ")
_ID = struct.Struct(">2sQ")
_TIMES = struct.Struct("<BQBQ")
_DOUBLE = struct.Struct("<d")
_EVENT_TIME = struct.Struct("<BQ")
_FIXED_32 = struct.Struct("<I")
_MAX_INT = 2**63 - 1
_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))
_AT_HOME = _FLAGS + _FIXED_32.pack(_KNOWS_IF_REMOTE)
_ELSEWHERE = _FLAGS + _FIXED_32.pack(_KNOWS_IF_REMOTE | _IS_REMOTE)


class EncodedTrace(NamedTuple):
    """The spans of one request: entries of `ScopeSpans.spans`."""

    num_spans: int
    data: bytes


class SpanPlace:
    """Says of spans of one trace which trace that is. `trace`: 32 hex digits; `state`: its
    `tracestate`, as it is sent."""

    __slots__ = ("_state", "_trace")

    def __init__(self, trace: str, state: str = "") -> None:
        self._trace = bytes.fromhex(trace)
        self._state = _sized(_TRACE_STATE, state.encode()) if state else b""

    def encode(
        self, span_id: int, parent_id: int, begins_ns: int, ends_ns: int, head: bytes, rest: bytes
    ) -> bytes:
        """Encode a span below another one of this process; `parent_id` 0: below none. `head`, and
        `rest`, which is of this span alone: encoded attributes, events and links."""
        parent = _ID.pack(_PARENT_ID, parent_id) if parent_id else b""
        return self._encode(span_id, parent, begins_ns, ends_ns, _AT_HOME + head, rest)

    def encode_below_remote(
        self, span_id: int, parent_id: int, begins_ns: int, ends_ns: int, head: bytes, rest: bytes
    ) -> bytes:
        """The same below a span that is elsewhere."""
        parent = _ID.pack(_PARENT_ID, parent_id)
        return self._encode(span_id, parent, begins_ns, ends_ns, _ELSEWHERE + head, rest)

    def _encode(
        self, span_id: int, parent: bytes, begins_ns: int, ends_ns: int, head: bytes, rest: bytes
    ) -> bytes:
        ids = _IDS.pack(_TRACE_ID, self._trace, _SPAN_ID, span_id)
        times = _TIMES.pack(_START, begins_ns, _END, ends_ns)
        return _sized(_SPANS, b"".join((ids, self._state, parent, times, head, rest)))


def encode_head(name: str, kind: SpanKind, attributes: Attributes, *, is_failed: bool) -> bytes:
    """Encode what a span has in common with others."""
    named = _sized(_NAME, _utf8(name)) + _KIND + _ONE_BYTE[kind.value + 1]
    return named + (_FAILED if is_failed else _FINE) + encode_attributes(attributes)


def encode_attributes(attributes: Mapping[str, Value]) -> bytes:
    return b"".join([_attribute(_ATTRIBUTES, *each) for each in attributes.items()])


def encode_event(name: str, at_ns: int, attributes: Mapping[str, Value]) -> bytes:
    said = b"".join([_attribute(b"\x1a", *each) for each in attributes.items()])
    return _sized(_EVENTS, _EVENT_TIME.pack(0x09, at_ns) + _sized(b"\x12", _utf8(name)) + said)


def encode_link(trace: str, span_id: str, state: str) -> bytes:
    """Encode a link to a span that is elsewhere, whose ids are hex digits."""
    ids = _TRACE_ID + bytes.fromhex(trace) + _SPAN_ID + bytes.fromhex(span_id)
    told = _sized(b"\x1a", state.encode()) if state else b""
    flags = b"\x35" + _FIXED_32.pack(_KNOWS_IF_REMOTE | _IS_REMOTE)
    return _sized(_LINKS, ids + told + flags)


class SpanEnvelope:
    """Makes the message that a collector takes, an `ExportTraceServiceRequest`, of the spans of one
    resource and scope, which OpenTelemetry's SDK encodes."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        span = ReadableSpan(
            "", INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=scope
        )
        [of_resource] = encode_spans([span]).resource_spans
        [of_scope] = of_resource.scope_spans
        of_scope.ClearField("spans")
        self._scope = of_scope.SerializeToString()
        of_resource.ClearField("scope_spans")
        self._resource = of_resource.SerializeToString()

    def message_of(self, traces: Iterable[EncodedTrace]) -> bytes:
        spans = b"".join([self._scope, *(trace.data for trace in traces)])
        return _sized(b"\x0a", self._resource + _sized(b"\x12", spans))


_KEYS: dict[str, bytes] = {}
"""The beginnings of attributes by their names, which are those of `conventions`."""


def _attribute(field: bytes, name: str, value: Value) -> bytes:
    key = _KEYS.get(name)
    if key is None:
        key = _KEYS[name] = _sized(b"\x0a", name.encode()) + b"\x12"
    said = _any_value(value)
    size = len(key) + len(said) + 1
    if size < 0x80:
        return b"".join((field, _ONE_BYTE[size], key, _ONE_BYTE[len(said)], said))
    return _sized(field, key + _varint(len(said)) + said)


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return _sized(b"\x0a", _utf8(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(min(value, _MAX_INT))
    return b"\x21" + _DOUBLE.pack(value)


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")


def _sized(field: bytes, data: bytes) -> bytes:
    size = len(data)
    return field + (_ONE_BYTE[size] if size < 0x80 else _varint(size)) + data


def _varint(number: int) -> bytes:
    if 0 <= number < 0x80:
        return _ONE_BYTE[number]
    number &= 2**64 - 1  # a negative one has ten bytes
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
