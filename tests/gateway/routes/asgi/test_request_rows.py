"""A row says of an answer what its access log and its bill say, and whose it is."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest

from foundation.request_context import LogContext
from foundation.stages import Stage
from gateway.generation_events import CacheOutcome, MeteredUsage
from gateway.lanes import Slo
from gateway.request_log.answers import MAX_STAGES, MAX_TEXT_CHARS, NotedAnswer
from gateway.request_log.histograms import unpack
from gateway.request_log.rows import RequestRow, StageRow
from gateway.routes.asgi.access_log import AccessLine, AccessLog
from gateway.routes.asgi.request_rows import recording
from gateway.settings.file import LogsConfig
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from tests.gateway.inference.test_price_lists import WHO
from tests.gateway.routes.asgi.test_access_log import CHAT, REQUEST, billed


def rows_of(*answers: NotedAnswer, telemetry: Telemetry | None = None) -> list[RequestRow]:
    found: list[RequestRow] = []
    telemetry = telemetry or Telemetry(models=["m"])
    record = recording(found.append)
    heard: list[AccessLine] = []

    def on_answer(answer: NotedAnswer, line: AccessLine) -> None:
        heard.append(line)
        record(answer, line)

    quiet = LogsConfig(access=False)
    log = AccessLog(quiet, telemetry, lambda lines: None, process="worker-0", on_answer=on_answer)
    with log.running():
        for each in answers:
            log.note(each)
    assert len(heard) == len(answers)
    return found


def answered(**fields: Any) -> NotedAnswer:
    whole = NotedAnswer(9.0, 1.5, "POST", CHAT, "200", LogContext(REQUEST), "m", WHO, None, None)
    return whole._replace(**fields)


def test_a_row_has_what_was_used_and_how_long_it_took() -> None:
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m")
    meter.promise("agentic", Slo(ttft_s=1.0, tpot_s=0.1))
    meter.ttft_s, meter.queue_time_s = 0.0123, 0.004
    meter.used(billed(MeteredUsage(uncached_input=3, cache_read=2, output=5, reasoning_output=1)))
    meter.again().used(billed(MeteredUsage(uncached_input=4, embedding_input=8, output=1)))
    meter.judge(200)
    meter.cache = CacheOutcome(cause="changed", position=268)
    meter.tags = {"team": "search"}
    for _ in range(99):
        meter.gaps.add(0.02, 1)
    meter.gaps.add(1.8, 2)
    [row] = rows_of(answered(meter=meter), telemetry=telemetry)
    assert (row.id, row.at_ms) == (REQUEST[4:], int(REQUEST[4:16], 16))
    assert (row.org, row.project, row.key) == (WHO.org_id, WHO.project_id, WHO.key_id)
    assert (row.model, row.lane, row.route, row.status) == ("m", "agentic", CHAT, 200)
    assert (row.duration_us, row.ttft_us, row.queue_us) == (1_500_000, 12_300, 4_000)
    assert (row.tpot_us, row.is_good) == (37_426, True)
    assert row.itl_p50_us == pytest.approx(20_000, rel=0.05)
    assert row.itl_p99_us == pytest.approx(900_000, rel=0.05)
    assert row.itl is not None and sum(unpack(str(int(Decimal(row.itl))))) == 101
    assert (row.uncached_tokens, row.cached_tokens, row.written_tokens) == (15, 2, 0)
    assert (row.output_tokens, row.reasoning_tokens) == (6, 1)
    assert row.cost_pico == (3 + 4 + 8) * 10 + (5 + 1) * 100
    assert row.trace == REQUEST[4:]
    assert (row.cache_cause, row.cache_position) == ("changed", 268)
    assert (row.batch, row.tags, row.error_code) == (None, {"team": "search"}, None)


@pytest.mark.parametrize(
    "fields", [{"principal": None}, {"context": None}, {"route": "/v1/models"}, {"route": "-"}]
)
def test_what_is_nobodys_or_asks_no_model_has_none(fields: dict[str, Any]) -> None:
    assert rows_of(answered(**fields)) == []


def test_a_refusal_is_in_the_lane_that_it_was_meant_for() -> None:
    who = msgspec.structs.replace(WHO, key_lane="batch")
    refused, unread = rows_of(
        answered(status="429", principal=who, error_code="rate_limit_exceeded"),
        answered(status="400", model="", error_code="of_theirs\0" + "x" * 200),
    )
    assert refused.error_code == "rate_limit_exceeded"
    assert unread.error_code == "of_theirs?" + "x" * (MAX_TEXT_CHARS - 10), "an upstream's may be"
    assert (refused.status, refused.lane, refused.model) == (429, "batch", "m")
    assert (unread.status, unread.lane, unread.model) == (400, "interactive", "-")
    assert refused.is_good is None
    assert refused.cost_pico == refused.output_tokens == 0


def test_stages_are_told_from_the_begin_of_the_request_and_bounded() -> None:
    context = LogContext(REQUEST)
    context.stages.add(Stage("queue", 100.5, 100.75, "penny/0"))
    context.stages.add(Stage("tool_call", 101.0, 102.0, "srv/\0" + "x" * 200, "ToolFailed"))
    [row] = rows_of(answered(context=context, began_at=100.0))
    assert row.stages is not None
    queue, call = row.stages
    assert queue == StageRow("queue", 500_000, 250_000, "penny/0", "")
    assert call.outcome == "ToolFailed" and call.about == "srv/?" + "x" * (MAX_TEXT_CHARS - 5)
    for number in range(100):
        context.stages.add(Stage("decode", 103.0 + number, 103.5 + number))
    [row] = rows_of(answered(context=context, began_at=100.0))
    assert row.stages is not None and len(row.stages) == MAX_STAGES
    assert row.stages[0] == queue and row.stages[-1].began_us == 102_000_000


def test_a_model_that_nobody_configured_is_not_repeated() -> None:
    [row] = rows_of(answered(status="404", model="a\0guess"))
    assert row.model == "-"
