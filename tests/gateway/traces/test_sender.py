"""Spans reach a collector by either protocol; one that is away, hangs or is flooded costs spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from bench.tools.ports import free_port
from foundation.request_context import LogContext
from gateway.request_log.answers import NotedAnswer
from gateway.routes.asgi.access_log import AccessLog
from gateway.settings.file import LogsConfig, TracesConfig
from gateway.telemetry.metrics import Telemetry
from gateway.traces import sender
from gateway.traces.request_spans import SCOPE, RequestSpans, recording_spans, resource_of
from gateway.traces.sender import MAX_WAITING_TRACES, SpanSender, make_exporter
from gateway.traces.span_encoding import EncodedTrace, SpanEnvelope
from tests.gateway.traces.collectors import COLLECTORS, Taken, said
from tests.gateway.traces.test_request_spans import ALL, REQUEST, SENT, TRACE, answered, traces_of

PROTOCOLS = sorted(COLLECTORS)


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def collector(protocol: str) -> Iterator[Taken]:
    with COLLECTORS[protocol]() as taken:
        yield taken


def config_of(url: str, protocol: str, **fields: str) -> TracesConfig:
    return TracesConfig(endpoint=url, protocol=protocol, **fields)  # type: ignore[arg-type]


def lost_and_sent(telemetry: Telemetry) -> tuple[float, float]:
    value = telemetry.registry.get_sample_value
    return value("tollgate_spans_lost_total") or 0, value("tollgate_spans_sent_total") or 0


def note(config: TracesConfig, *answers: NotedAnswer, access: bool = True) -> tuple[bytes, float]:
    """Note what was answered, end, and return the lines of the access log and the spans lost."""
    written: list[bytes] = []
    telemetry = Telemetry(models=["m"])
    with recording_spans(config, telemetry, process="worker-0") as record:
        log = AccessLog(
            LogsConfig(access=access), telemetry, written.append, process="w", on_answer=record
        )
        with log.running():
            for answer in answers:
                log.note(answer)
    return b"".join(written), lost_and_sent(telemetry)[0]


def test_a_collector_gets_the_spans_of_a_request(
    collector: Taken, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTOR_HEADERS", "x-token=a b=c, X-Other = y")
    context = LogContext(REQUEST, SENT, ALL)
    with context.stages.begin("admit"):
        pass
    config = config_of(collector.url, protocol, headers_env="COLLECTOR_HEADERS")
    lines, num_lost = note(config, answered(context))
    assert REQUEST.encode() in lines and num_lost == 0
    request, admit = collector.spans
    assert request.trace_id.hex() == admit.trace_id.hex() == TRACE
    assert (request.trace_state, request.parent_span_id.hex()) == ("a=1", "00f067aa0ba902b7")
    assert admit.parent_span_id == request.span_id
    assert said(request)["tollgate.request.id"] == REQUEST
    [resource] = collector.resources
    assert (resource["service.name"], resource["service.instance.id"]) == ("tollgate", "worker-0")
    assert collector.tokens == ["a b=c"]


def test_lines_and_spans_are_wanted_each_by_itself(collector: Taken, protocol: str) -> None:
    config = config_of(collector.url, protocol)
    assert note(config, answered(LogContext(REQUEST, (), ALL)), access=False)[0] == b""
    assert len(collector.spans) == 1


def test_a_collector_that_is_away_keeps_no_line_and_no_end(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CLOSE_TIMEOUT_S", 0.05)
    config = config_of(f"http://127.0.0.1:{free_port()}", protocol)
    lines, _ = note(config, answered(LogContext(REQUEST, (), ALL)))
    assert REQUEST.encode() in lines


def test_a_collector_that_is_away_costs_spans_which_are_counted(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "EXPORT_TIMEOUT_S", 0.2)
    telemetry = Telemetry(models=["m"])
    sending = sender_of(config_of(f"http://127.0.0.1:{free_port()}", protocol), telemetry)
    for _ in range(2):
        sending.put(one_trace())
        sending.send_waiting()
    assert lost_and_sent(telemetry) == (2, 0)
    said_of_it = [
        each.message
        for each in caplog.records
        if "collector" in each.message and each.threadName == "MainThread"
    ]
    assert said_of_it == ["traces: the collector takes no spans: they are lost"], "said once"


def test_a_hanging_collector_holds_nobody_up_and_a_flood_is_bounded(
    collector: Taken, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SEND_INTERVAL_S", 0.01)
    monkeypatch.setattr(sender, "CLOSE_TIMEOUT_S", 0.05)
    collector.held = threading.Event()
    telemetry = Telemetry(models=["m"])
    answer = answered(LogContext(REQUEST, (), ALL))
    log = AccessLog(LogsConfig(), telemetry, lambda _: None, process="w")
    sending = sender_of(config_of(collector.url, protocol), telemetry)
    spans = RequestSpans(sending, slow_s=None)
    with sending.running():
        sending.put(one_trace())
        deadline = time.monotonic() + 30
        while sending._waiting:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for _ in range(MAX_WAITING_TRACES + 100):  # while the collector has the first one
            spans.record(answer, log.to_line(answer))
        assert len(sending._waiting) <= MAX_WAITING_TRACES
        assert sending._num_refused == 100
    collector.held.set()


def test_a_collector_that_is_back_gets_what_comes_from_then_on(
    collector: Taken, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = Telemetry(models=["m"])
    sending = sender_of(config_of(collector.url, protocol), telemetry)
    sending._is_away = True
    sending.put(one_trace())
    sending.send_waiting()
    assert lost_and_sent(telemetry) == (0, 1) and len(collector.spans) == 1
    assert "traces: the collector takes spans again" in caplog.messages


def test_traces_that_wait_are_bounded_in_bytes_and_sent_in_bounded_messages() -> None:
    sent: list[bytes] = []

    class Keeping:
        def send(self, message: bytes) -> bool:
            sent.append(message)
            return True

        def shutdown(self) -> None: ...

    counted: list[int] = []
    envelope = SpanEnvelope(resource_of("worker-0"), SCOPE)
    sending = SpanSender(Keeping(), envelope, count_sent=counted.append, count_lost=counted.append)
    long = EncodedTrace(1, b"x" * (sender.MAX_BYTES_AT_ONCE // 2 + 1))
    while sending.has_room:
        sending.put(long)
    num_waiting = len(sending._waiting)
    assert num_waiting <= sender.MAX_WAITING_BYTES // len(long.data) + 1
    sending.send_waiting()
    assert sending.has_room and counted == [1] * num_waiting == [1] * len(sent)
    for _ in range(sender.MAX_SPANS_AT_ONCE + 1):
        sending.put(EncodedTrace(1, b"x"))
    sending.send_waiting()
    assert counted[num_waiting:] == [sender.MAX_SPANS_AT_ONCE, 1]


def test_an_exporter_that_fails_loses_what_it_was_given() -> None:
    class Broken:
        def send(self, message: bytes) -> bool:
            raise OSError

        def shutdown(self) -> None: ...

    lost: list[int] = []
    envelope = SpanEnvelope(resource_of("worker-0"), SCOPE)
    sending = SpanSender(Broken(), envelope, count_sent=lost.append, count_lost=lost.append)
    sending.put(EncodedTrace(3, b"x"))
    with pytest.raises(OSError):
        sending.send_waiting()
    assert lost == [3] and not sending._waiting


def one_trace() -> EncodedTrace:
    [trace] = traces_of(answered(LogContext(REQUEST, (), ALL)))
    return trace


def sender_of(config: TracesConfig, telemetry: Telemetry) -> SpanSender:
    return SpanSender(
        make_exporter(config),
        SpanEnvelope(resource_of("worker-0"), SCOPE),
        count_sent=telemetry.spans_sent.inc,
        count_lost=telemetry.spans_lost.inc,
    )
