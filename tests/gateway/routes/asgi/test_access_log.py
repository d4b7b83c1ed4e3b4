"""One line for each answered request: who, what, how much, and never what was said or shown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from litestar import Litestar

from billing.events import Attempt, Component, Price, UsageEvent
from foundation.request_context import LogContext
from gateway.app.create import create_app
from gateway.fleet.router import Fleet
from gateway.generation_events import MeteredUsage
from gateway.inference.metering import to_events
from gateway.lanes import LaneDeadlines
from gateway.networks import Networks
from gateway.principal import Principal
from gateway.request_log.answers import NotedAnswer
from gateway.routes.asgi.access_log import AccessLog, is_over
from gateway.routes.asgi.request_metrics import ACCESS_LOG, note_refused
from gateway.settings.file import LogsConfig
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from tests.gateway.inference.test_price_lists import WHO

CHAT = "/v1/chat/completions"
KEY, PROMPT, ADDRESS = "sk-tg-canary", "a-canary-in-a-prompt", "203.0.113.7"
ASKED = {"messages": [{"role": "user", "content": PROMPT}]}
REQUEST = "req_01890000000070008000000000000000"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Everybody:
    async def authenticate(self, bearer: str) -> Principal:
        return msgspec.structs.replace(WHO, scopes=frozenset({"inference"}))


@pytest.fixture
def app(tmp_path: Path) -> Litestar:
    made = create_app(load({"home": tmp_path}, {}))
    made.state.services = SimpleNamespace(
        telemetry=Telemetry(models=["penny"]),
        authenticator=Everybody(),
        generation=SimpleNamespace(fleet=Fleet([]), deadlines=LaneDeadlines()),
        trusted_proxies=Networks(),
    )
    return made


async def lines_of(
    app: Litestar, config: LogsConfig, path: str = CHAT
) -> tuple[str, httpx.Response]:
    """Return what the log has of one chat, and its answer."""
    written: list[bytes] = []
    log = AccessLog(config, app.state.services.telemetry, written.append, process="worker-0")
    app.state[ACCESS_LOG] = log
    transport = httpx.ASGITransport(app=app, client=(ADDRESS, 1))  # type: ignore[arg-type]
    with log.running():
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.post(
                f"{path}?q={PROMPT}",
                headers={"authorization": f"Bearer {KEY}"},
                json={"model": "penny", "max_tokens": 9, **ASKED},
            )
    return b"".join(written).decode(), answer


async def test_a_request_is_one_line_that_its_client_can_name(app: Litestar) -> None:
    text, answer = await lines_of(app, LogsConfig())
    [line] = [json.loads(each) for each in text.splitlines()]
    assert line["request"] == answer.headers["x-request-id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", CHAT, answer.status_code)
    assert (line["process"], line["model"]) == ("worker-0", "penny")
    assert (line["key"], line["org"]) == (WHO.key_id, WHO.org_id)
    assert line["duration_ms"] > 0
    assert [each for each in (KEY, PROMPT, ADDRESS) if each in text] == []


@pytest.mark.parametrize(("path", "read"), [(CHAT, "code"), ("/v1/messages", "type")])
async def test_a_failure_has_the_code_that_its_client_reads(
    app: Litestar, path: str, read: str
) -> None:
    text, answer = await lines_of(app, LogsConfig(), path)
    code = answer.json()["error"][read]
    assert code in ("model_not_found", "not_found_error")
    assert json.loads(text)["error_code"] == code
    text, _ = await lines_of(app, LogsConfig(format="human"), path)
    assert f" {code} " in text


async def test_its_tenant_is_counted_with_or_without_a_line(app: Litestar) -> None:
    telemetry = app.state.services.telemetry = Telemetry(models=["penny"], counts_tenants=True)
    for access in (True, False):
        _, answer = await lines_of(app, LogsConfig(access=access))
    assert 400 <= answer.status_code < 500, "there is no such model"
    labels = {"org": WHO.org_id, "outcome": "refused"}
    assert telemetry.registry.get_sample_value("tollgate_tenant_requests_total", labels) == 2


async def test_an_address_is_shown_to_who_asks_for_it(app: Litestar) -> None:
    text, _ = await lines_of(app, LogsConfig(client_address=True))
    assert json.loads(text)["client"] == ADDRESS


async def test_a_line_for_a_person_ends_with_the_id(app: Litestar) -> None:
    text, answer = await lines_of(app, LogsConfig(format="human"))
    assert f" POST {CHAT} {answer.status_code} " in text
    assert text.endswith(f"[{answer.headers['x-request-id']}]\n")


def billed(usage: MeteredUsage) -> UsageEvent:
    prices: dict[Component, Price] = {
        "uncached_input": Price(price_id="in", pico_per_token=10),
        "output": Price(price_id="out", pico_per_token=100),
    }
    record = Attempt(
        id="a", request_id=REQUEST, org="o", project="p", key="k", model="m", prices=prices,
        admitted_at=0.0,
    )  # fmt: skip
    return to_events(record, usage, replica="m/0", kind="usage", finish="done")[0]


def test_all_generations_of_a_request_are_counted_and_rated() -> None:
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m")
    meter.ttft_s, meter.queue_time_s = 0.0123, 0.004
    meter.used(billed(MeteredUsage(uncached_input=3, cache_read=2, output=5, reasoning_output=1)))
    meter.again().used(billed(MeteredUsage(uncached_input=4, output=1)))
    log = AccessLog(LogsConfig(), telemetry, lambda lines: None, process="worker-0")
    line = log.to_line(
        NotedAnswer(0.0, 1.5, "POST", CHAT, "200", LogContext(REQUEST), "m", WHO, meter, None)
    )
    written = json.loads(msgspec.json.encode(line))
    assert written["tokens"] == {"uncached": 7, "cache_read": 2, "output": 5, "reasoning": 1}
    assert (written["ttft_ms"], written["queue_ms"], written["duration_ms"]) == (12.3, 4.0, 1500.0)
    by_hand = (3 + 4) * 10 + (5 + 1) * 100  # nothing is asked for what has no price
    assert written["cost_pico_usd"] == by_hand


def test_a_line_waits_a_moment_for_what_is_done_after_the_answer() -> None:
    context = LogContext(REQUEST)
    answer = NotedAnswer(
        time.time(), 1.5, "POST", CHAT, "200", context, "m", WHO, None, None, time.perf_counter()
    )
    assert is_over(answer)
    settle = context.stages.begin("settle")
    assert not is_over(answer)
    assert is_over(answer._replace(ended_at=time.time() - 60)), "but not for long"
    settle.end()
    assert is_over(answer)


def test_what_is_refused_before_it_is_a_request_has_a_line_and_is_counted() -> None:
    telemetry, written = Telemetry(models=["m"]), list[bytes]()
    log = AccessLog(LogsConfig(), telemetry, written.append, process="worker-0")
    with log.running():
        note_refused(telemetry, log, REQUEST, 431)
    line = json.loads(b"".join(written))
    assert (line["status"], line["route"], line["request"]) == (431, "-", REQUEST)
    labels = {"route": "-", "model": "-", "status": "431"}
    assert telemetry.registry.get_sample_value("tollgate_requests_total", labels) == 1


def test_a_model_that_nobody_configured_is_not_repeated() -> None:
    log = AccessLog(LogsConfig(), Telemetry(models=["m"]), lambda lines: None, process="worker-0")
    answer = NotedAnswer(0.0, 0.1, "POST", CHAT, "404", None, "a\nguess", None, None, None)
    line = json.loads(msgspec.json.encode(log.to_line(answer)))
    assert line["model"] == "-"
    assert {"request", "key", "tokens", "cost_pico_usd"}.isdisjoint(line)


def test_a_line_names_its_trace_at_the_buckets_of_its_request() -> None:
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m")
    meter.wrote_first()
    log = AccessLog(LogsConfig(), telemetry, lambda lines: None, process="worker-0")
    context = LogContext(REQUEST, [(b"traceparent", f"00-{TRACE}-{'1' * 16}-01".encode())])
    answer = NotedAnswer(9.0, 0.5, "POST", CHAT, "200", context, "m", None, meter, None)
    log._encode(answer)
    [ttft] = [each for each in telemetry.own_histograms() if "first_token" in each.name]
    [exemplar] = [each for each in ttft.series[0].exemplars if each is not None]
    assert (exemplar.trace, exemplar.at, exemplar.value) == (TRACE, 9.0, meter.ttft_s)
