"""Models that upstreams serve, behind one Tollgate: what they are sent, what the customer sees,
what is billed when they fail, and to whom their keys are told: nobody."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from tests.chaos import load
from tests.chaos.load import check_books
from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Script,
    chunk,
    completion,
    usage_chunk,
)
from tests.journeys import reports
from tests.journeys.reports import costs_pico, events, eventually, next_event, usage_of_today
from tests.journeys.served_models.configuration import (
    BIG_KEY,
    BIG_PRICES,
    CANARY,
    PRIORITY_TIMES,
)
from tests.journeys.upstreams import (
    HELLO,
    LiveUpstream,
    answers,
    ask,
    askers,
    dies_at_once,
    good,
    holds_the_holder,
    post,
    sends_an_error_event,
    text_of,
)
from tests.stack import Stack

pytestmark = pytest.mark.slow

NUM_SHARED = 300
"""The share of two thirds of so many has a standard deviation of 8."""


@pytest.fixture
def big(upstreams: dict[str, LiveUpstream]) -> LiveUpstream:
    return upstreams["big"]


@pytest.fixture
def wide(upstreams: dict[str, LiveUpstream]) -> list[LiveUpstream]:
    """The two replicas."""
    return [upstreams["wide"], upstreams["other"]]


@pytest.fixture
def narrow(upstreams: dict[str, LiveUpstream]) -> LiveUpstream:
    """Two requests at a time."""
    return upstreams["narrow"]


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return stack.client(max_retries=0)


NAMES = ["penny", "big", "wide", "narrow", "limited"]


def test_all_models_are_listed_and_penny_answers_beside_the_upstreams(client: OpenAI) -> None:
    found = [model.id for model in client.models.list()]
    assert found[: len(NAMES)] == NAMES
    assert ask(client, "penny", max_tokens=4).usage.completion_tokens > 0


def test_no_child_has_a_secret_that_is_not_its_own(stack: Stack, client: OpenAI) -> None:
    """A grammar is asked for, so that the engine has its own child as well."""
    form: Any = {"type": "json_object"}
    assert ask(client, "penny", max_tokens=4, response_format=form).usage.completion_tokens > 0
    assert stack.process is not None
    children = psutil.Process(stack.process.pid).children(recursive=True)
    keys: dict[str, list[bool]] = {}
    for child in children:
        try:
            line, environ = child.cmdline(), Path(f"/proc/{child.pid}/environ").read_bytes()
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # a backend of Postgres that ended
        assert CANARY.encode() not in environ and b"TOLLGATE_" not in environ, line
        kind = next((each for each in KINDS if any(each in part for part in line)), "?")
        keys.setdefault(kind, []).append(BIG_KEY.encode() in environ)
    assert {kind: any(found) for kind, found in keys.items()} == KINDS


KINDS = {"postgres": False, "valkey": False, "engine": False, "worker": True}
"""The children of a Tollgate by a word of their command lines, and whether they need the keys of
upstreams."""


def test_a_whole_answer_comes_under_our_name_with_what_is_billed(
    client: OpenAI, big: LiveUpstream
) -> None:
    big.play(good)
    answer = ask(client, "big", temperature=0.5, extra_body={"vendor_extra": [1], "top_k": 3})
    assert (answer.model, text_of(answer)) == ("big", "Hello there")
    assert answer.usage.prompt_tokens == 20 and answer.usage.completion_tokens == 5
    details = answer.usage.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (8, 4)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert not hasattr(answer.usage, "cost"), "what the upstream charges is nobody's business"
    (exchange,) = big.exchanges
    assert exchange.headers["authorization"] == f"Bearer {BIG_KEY}"
    extra = {"temperature": 0.5, "vendor_extra": [1], "top_k": 3}
    assert exchange.body == {"model": "big", "messages": HELLO, **extra}


def test_answers_of_one_id_are_each_billed(stack: Stack, client: OpenAI, big: LiveUpstream) -> None:
    big.play(good)
    before = len(events(stack, "big"))
    assert len({ask(client, "big").id for _ in range(3)}) == 1, "it is the upstream's own"
    stack.wait("each is billed", lambda: len(events(stack, "big")) == before + 3)


def test_an_upstreams_own_name_of_the_model_stays_there(
    client: OpenAI, wide: list[LiveUpstream]
) -> None:
    for replica in wide:
        replica.play(good)
    assert ask(client, "wide").model == "wide"
    assert {chunk.model for chunk in ask(client, "wide", stream=True)} == {"wide"}
    asked = [exchange.body["model"] for replica in wide for exchange in replica.exchanges]
    assert asked == ["Qwen3-32B"] * 2


def test_usage_is_asked_for_upstream_and_shown_to_who_asked(
    stack: Stack, client: OpenAI, big: LiveUpstream
) -> None:
    big.play(good)
    plain = list(ask(client, "big", stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    asked = list(ask(client, "big", stream=True, stream_options={"include_usage": True}))
    assert asked[-1].choices == [] and asked[-1].usage.total_tokens == 25
    assert all(chunk.choices and chunk.usage is None for chunk in asked[:-1])
    assert len(asked) == len(plain) + 1
    for exchange in big.exchanges:
        assert exchange.body["stream_options"] == {"include_usage": True}
    with post(stack, model="big", stream=True) as answer:
        assert b"usage" not in answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_chunk_is_passed_on_before_the_next_one_is_there(
    client: OpenAI, big: LiveUpstream
) -> None:
    seen = threading.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("first"))
        assert await asyncio.to_thread(seen.wait, 10), "the first chunk is held back"
        await exchange.send(chunk(" second"), chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    big.play(script)
    stream = ask(client, "big", stream=True)
    assert next(stream).choices[0].delta.content == "first"
    seen.set()
    assert text_of(stream) == " second"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("service_tier", "scale", "service_tier"),
        ("web_search_options", {}, "web_search_options"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("modalities", ["text", "audio"], "modalities"),
        ("plugins", [{"id": "web"}], "plugins"),
    ],
)
def test_what_would_change_the_bill_is_refused_by_name(
    client: OpenAI, big: LiveUpstream, field: str, value: Any, param: str
) -> None:
    big.play(good)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "big", extra_body={field: value})
    assert caught.value.param == param
    assert big.exchanges == []


def test_the_costs_agree_with_the_price_book_to_the_pico(
    stack: Stack, client: OpenAI, big: LiveUpstream
) -> None:
    big.play(good)
    events(stack, "big")
    before, usage = costs_pico(client), usage_of_today(client, models=["big"])
    for stream in (False, True):
        text_of(ask(client, "big", stream=stream))
    price = BIG_PRICES
    one = 8 * price["uncached_input"] + 8 * price["cache_read"]
    one += 4 * price["cache_write"] + 5 * price["output"]
    eventually(lambda: costs_pico(client), before + 2 * one)
    added = {"input_tokens": 40, "output_tokens": 10, "input_cached_tokens": 16}
    added["num_model_requests"] = 2
    expected = {name: usage.get(name, 0) + value for name, value in added.items()}
    assert usage_of_today(client, models=["big"]) == expected
    last = events(stack, "big")[-1]
    assert (last.estimated, last.suspended, last.finish) == (False, False, "done")


def test_who_asks_for_a_tier_is_served_told_and_billed_it(
    stack: Stack, client: OpenAI, big: LiveUpstream
) -> None:
    big.play(good)
    events(stack, "big")
    before = costs_pico(client)
    answer = ask(client, "big", service_tier="priority")
    assert answer.service_tier == "priority"
    chunks = list(ask(client, "big", service_tier="flex", stream=True))
    assert {chunk.service_tier for chunk in chunks} == {"flex"}
    plain = ask(client, "big", tools=[{"type": "function", "function": {"name": "f"}}])
    assert plain.service_tier is None, "what the upstream says, who names no tier"
    assert all("service_tier" not in exchange.body for exchange in big.exchanges)
    one = 8 * (BIG_PRICES["uncached_input"] + BIG_PRICES["cache_read"])
    one += 4 * BIG_PRICES["cache_write"] + 5 * BIG_PRICES["output"]
    eventually(lambda: costs_pico(client), before + (PRIORITY_TIMES + 2) * one)
    booked = [(event.tier, event.lane) for event in events(stack, "big")[-3:]]
    assert booked == [("priority", "interactive"), ("flex", "batch"), ("default", "agentic")]
    unsold = ask(client, "penny", service_tier="priority", max_tokens=4)
    assert unsold.service_tier == "default"


async def test_a_model_without_a_price_is_counted_costs_nothing_and_waits_in_suspense(
    stack: Stack, wide: list[LiveUpstream]
) -> None:
    for replica in wide:
        replica.play(good)
    client = stack.client(max_retries=0, api_key=await asyncio.to_thread(stack.create_key))
    (key,) = await stack.sql("SELECT id FROM api_keys ORDER BY created_at DESC LIMIT 1")
    await asyncio.to_thread(ask, client, "wide")
    seen = partial(usage_of_today, client, models=["wide"], api_key_ids=[key.id])
    await asyncio.to_thread(eventually, lambda: seen().get("input_tokens"), 20)
    assert seen()["num_model_requests"] == 1
    assert set(await asyncio.to_thread(reports.costs_of, client, "wide")) == {0}
    (event,) = await stack.sql(f"SELECT * FROM usage_events WHERE key = '{key.id}'")
    assert event.suspended and (event.output, event.reasoning_output) == (3, 2)
    posted = await stack.sql(f"SELECT * FROM transfers WHERE event_id = '{event.id}'")
    assert [(row.kind, row.amount_pico, row.credit) for row in posted] == [
        ("suspense", 0, "suspense")
    ]
    await check_books(stack)


BEFORE_THE_FIRST_BYTE = {
    "429": answers(429),
    "500": answers(500),
    "503": answers(503),
    "bad key": answers(401, f"Incorrect API key provided: {BIG_KEY}"),
    "cut": dies_at_once,
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("failure", BEFORE_THE_FIRST_BYTE.values(), ids=BEFORE_THE_FIRST_BYTE)
def test_before_the_first_byte_the_next_replica_is_tried(
    stack: Stack, client: OpenAI, wide: list[LiveUpstream], failure: Script, stream: bool
) -> None:
    asked: list[Exchange] = []

    async def first_fails(exchange: Exchange) -> None:
        asked.append(exchange)
        await (failure if len(asked) == 1 else good)(exchange)

    for replica in wide:
        replica.play(first_fails)
    before = len(events(stack, "wide"))
    assert text_of(ask(client, "wide", stream=stream)) == ("Hello" if stream else "Hello there")
    assert [len(replica.exchanges) for replica in wide] == [1, 1]
    event = next_event(stack, "wide", before)
    assert (event.output, event.reasoning_output) == (3, 2)
    assert (event.estimated, event.finish) == (False, "done")


def test_an_error_event_before_the_first_chunk_lets_the_next_replica_answer(
    client: OpenAI, wide: list[LiveUpstream]
) -> None:
    asked: list[Exchange] = []

    async def first_fails(exchange: Exchange) -> None:
        asked.append(exchange)
        await (sends_an_error_event if len(asked) == 1 else good)(exchange)

    for replica in wide:
        replica.play(first_fails)
    assert text_of(ask(client, "wide", stream=True)) == "Hello"
    assert len(asked) == 2


def test_a_replica_that_refuses_connections_is_passed_over(
    stack: Stack, client: OpenAI, wide: list[LiveUpstream]
) -> None:
    down, up = wide
    up.play(good)
    down.close()

    def was_tried() -> bool:
        assert text_of(ask(client, "wide")) == "Hello there"
        log = stack.worker_logs()
        return "wide/0 is unavailable: wide/0: ConnectError" in log

    try:
        stack.wait("the replica that is down was tried", was_tried)
    finally:
        down.open()
    assert all(exchange.body["model"] == "Qwen3-32B" for exchange in up.exchanges)


async def endless(exchange: Exchange) -> None:
    """Claims a trillion of tokens and writes for as long as somebody listens."""
    if exchange.body.get("stream"):
        await exchange.begin_stream()
        claim = {"prompt_tokens": 10**12, "completion_tokens": 0}
        await exchange.send({**chunk(), "choices": [], "usage": claim})
        return await exchange.flood(chunk("words "))
    message = {"role": "assistant", "content": "words " * 4000}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10**12, "completion_tokens": 4000}
    await exchange.answer(completion(choices=[choice], usage=usage))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_upstream_that_ignores_its_bound_is_cut_and_billed_within_it(
    stack: Stack, client: OpenAI, big: LiveUpstream, stream: bool
) -> None:
    """On each surface, in its own words; the record of the request says what was claimed."""
    big.play(endless)
    before = len(events(stack, "big"))
    raw = client.chat.completions.with_raw_response
    answer = raw.create(model="big", messages=HELLO, max_tokens=20, stream=stream)
    parsed: Any = answer.parse()
    ends = [each.choices[0].finish_reason for each in (parsed if stream else [parsed])]
    assert ends[-1] == "length"
    said: Any = {"model": "big", "max_tokens": 20, "stream": stream}
    said["messages"] = [{"role": "user", "content": "hello"}]
    shown = httpx.post(
        f"{stack.base_url}/v1/messages",
        headers={"x-api-key": stack.credentials["api_key"], "anthropic-version": "2023-06-01"},
        json=said,
        timeout=30,
    )
    assert '"stop_reason":"max_tokens"' in shown.text
    responded: Any = client.responses.create(
        model="big", input="hello", max_output_tokens=20, stream=stream
    )
    last = [each.response for each in responded if hasattr(each, "response")] if stream else []
    response = last[-1] if stream else responded
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    stack.wait("each is billed", lambda: len(events(stack, "big")) == before + 3)
    for event in events(stack, "big")[before:]:
        assert event.uncached_input < 1000 and event.output == 20
    for exchange in big.exchanges if stream else ():
        big.wait_left(exchange, 30)
    request_id = answer.headers["x-request-id"]
    record = httpx.get(
        f"{stack.base_url}/api/v1/generation?id={request_id}",
        headers={"authorization": f"Bearer {stack.credentials['api_key']}"},
    )
    (attempt,) = record.json()["data"]["attempts"]
    assert attempt["disputed"]["input_tokens"] > 10**12 - 1000
    admin = {"authorization": f"Bearer {stack.credentials['admin_key']}"}
    listed = httpx.get(f"{stack.base_url}/v1/admin/disputed-usage", headers=admin).json()["data"]
    found = {each["request_id"]: each for each in listed}[request_id]
    assert (found["upstream"], found["model"]) == ("big/0", "big")
    assert stack.metric("tollgate_upstream_disputes_total", upstream="big/0") >= 3
    alerts = httpx.get(f"{stack.base_url}/v1/admin/alerts", headers=admin).json()["data"]
    disputed = [each["scope"]["id"] for each in alerts if each["type"] == "usage.disputed"]
    assert disputed.count("big") == 1


def test_what_an_upstream_cannot_take_at_once_waits_for_as_long_as_its_deadline(
    stack: Stack, client: OpenAI, narrow: LiveUpstream
) -> None:
    """Each of the two workers has one of its two places."""
    narrow.play(holds_the_holder)
    before, leave = len(events(stack, "narrow")), threading.Event()

    def hold() -> None:
        with post(stack, model="narrow", stream=True, user="holder") as held:
            answer = held.iter_text()  # it closes the response when it goes
            assert "mine" in next(answer)
            assert leave.wait(60)

    def count(state: str) -> float:
        name = f"tollgate_upstream_requests_{state}"
        return stack.metric(name, model="narrow", lane="interactive")

    with ThreadPoolExecutor(17) as pool:
        try:
            holders: list[Future[None]] = []
            while count("running") < 2:  # whichever worker accepts it
                assert len(holders) < 16
                holders.append(pool.submit(hold))
                stack.wait(
                    "it is seen", lambda: count("running") + count("waiting") == len(holders)
                )
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client, "narrow", extra_headers={"x-request-timeout-ms": "200"})
            late = {504: "deadline_exceeded", 503: "overloaded"}  # it is, or it would have been
            assert caught.value.code == late[caught.value.status_code]
            waiting = pool.submit(ask, client, "narrow")
            stack.wait("it waits", lambda: count("waiting") == len(holders) - 1)
            stack.wait("who waits has a lease", lambda: stack.open_leases() == len(holders) + 1)
            assert len(narrow.exchanges) == 2
        finally:
            leave.set()
        assert text_of(waiting.result(60)) == "Hello there"
        for holder in holders:
            holder.result(60)
    billed = before + len(holders) + 1
    stack.wait("all are billed", lambda: len(events(stack, "narrow")) == billed)
    stack.wait("nobody is there", lambda: count("running") == 0)


def test_when_no_replica_can_it_is_a_503_that_costs_nothing(
    stack: Stack, client: OpenAI, wide: list[LiveUpstream]
) -> None:
    for replica in wide:
        replica.play(answers(503))
    before = len(events(stack, "wide"))
    for stream in (True, False):
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, "wide", stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.response.headers["x-should-retry"] == "true"
    assert [len(replica.exchanges) for replica in wide] == [2, 2]
    assert len(events(stack, "wide")) == before
    assert stack.open_leases() == 0


def test_weights_share_the_work(stack: Stack, client: OpenAI, wide: list[LiveUpstream]) -> None:
    for replica in wide:
        replica.play(good)

    def ask_anew(_: int) -> None:
        """By a connection of its own: those that stay open may all be of one worker."""
        ask(client, "wide", extra_headers={"connection": "close"})

    with ThreadPoolExecutor(8) as pool:

        def no_worker_passes_one_over() -> bool:
            """Each has asked both: what failed in an earlier test comes last for a while."""
            list(pool.map(ask_anew, range(8)))
            return all(len(askers(stack, replica)) == 2 for replica in wide)

        stack.wait("each worker has asked both", no_worker_passes_one_over)
        for replica in wide:
            replica.play(good)
        list(pool.map(ask_anew, range(NUM_SHARED)))
    heavy, light = (len(replica.exchanges) for replica in wide)
    assert heavy + light == NUM_SHARED
    assert 1.25 < heavy / light < 3.6, "two to one: outside of this less than once in 1e4"


def test_after_the_first_byte_a_failure_is_an_error_event_and_is_billed(
    stack: Stack, client: OpenAI, wide: list[LiveUpstream]
) -> None:
    async def breaks_off(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk(""), chunk("Hel"), chunk("lo"), chunk(" wor"))
        exchange.writer.close()

    for replica in wide:
        replica.play(breaks_off)
    before = len(events(stack, "wide"))
    with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
        text_of(ask(client, "wide", stream=True))
    with post(stack, model="wide", stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert '"error"' in lines[-1] and "[DONE]" not in lines[-1]
    assert not any('"finish_reason":"' in line for line in lines), "never a fake stop"
    assert sum(len(replica.exchanges) for replica in wide) == 2, "no other replica was asked"
    stack.wait("both events are there", lambda: len(events(stack, "wide")) == before + 2)
    for event in events(stack, "wide")[before:]:
        assert (event.output, event.estimated, event.finish) == (3, True, "error")
        assert event.uncached_input > 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_without_usage_the_estimate_stands_marked_and_never_zero(
    stack: Stack, client: OpenAI, big: LiveUpstream, stream: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            await exchange.answer(completion(usage=None))
            return
        await exchange.begin_stream()
        await exchange.send(*(chunk(f"w{n} ") for n in range(7)), chunk(finish="stop"), "[DONE]")
        await exchange.end_stream()

    big.play(script)
    before, spent = len(events(stack, "big")), costs_pico(client)
    answer = ask(client, "big", stream=stream)
    assert text_of(answer)
    event = next_event(stack, "big", before)
    assert event.estimated and event.finish == "done"
    assert event.output == (7 if stream else 2)
    assert event.uncached_input > 5
    price = BIG_PRICES
    cost = event.uncached_input * price["uncached_input"] + event.output * price["output"]
    eventually(lambda: costs_pico(client), spent + cost)


def test_a_client_that_leaves_a_stream_cancels_the_upstream_and_pays(
    stack: Stack, client: OpenAI, big: LiveUpstream
) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk(""), chunk("one"), chunk(" two"), chunk(" three"))
        await exchange.hang()

    big.play(endless)
    before = len(events(stack, "big"))
    stream = ask(client, "big", stream=True)
    texts = ""
    while texts != "one two three":
        texts += next(stream).choices[0].delta.content or ""
    stream.close()
    big.wait_left(big.exchanges[0], 30.0)
    event = next_event(stack, "big", before)
    assert (event.output, event.estimated, event.finish) == (3, True, "disconnect")
    assert event.uncached_input > 0
    stack.wait("the reservation is settled", lambda: stack.open_leases() == 0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_before_the_first_byte_cancels_the_upstream_and_pays(
    stack: Stack, big: LiveUpstream, stream: bool
) -> None:
    asked = threading.Event()

    async def silent(exchange: Exchange) -> None:
        asked.set()
        await exchange.hang()

    big.play(silent)
    before = len(events(stack, "big"))
    request = {"model": "big", "messages": HELLO, "max_tokens": 500, "stream": stream}

    async def ask_and_leave() -> None:
        async with load.client(stack) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=request))
            assert await asyncio.to_thread(asked.wait, 60)
            asking.cancel()
            await asyncio.wait([asking])

    asyncio.run(ask_and_leave())
    big.wait_left(big.exchanges[0], 30.0)
    event = next_event(stack, "big", before)
    assert event.estimated and event.finish == "disconnect"
    assert event.uncached_input > 0
    if not stream:
        assert 0 < event.output <= 500
    stack.wait("the reservation is settled", lambda: stack.open_leases() == 0)


def test_a_refusal_is_told_in_the_upstreams_words_without_its_secrets(
    stack: Stack, client: OpenAI, wide: list[LiveUpstream]
) -> None:
    async def refuses(exchange: Exchange) -> None:
        words = f"Qwen3-32B takes 8 tokens at most (token {BIG_KEY})"
        error = {"message": words, "type": "invalid_request_error", "param": "messages"}
        await exchange.answer({"error": {**error, "code": "context_length_exceeded"}}, 400)

    for replica in wide:
        replica.play(refuses)
    before = len(events(stack, "wide"))
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "wide")
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    said = caught.value.response.text
    assert "wide takes 8 tokens at most" in said
    assert BIG_KEY not in said and "Qwen3" not in said
    assert sum(len(replica.exchanges) for replica in wide) == 1, "asking another would not help"
    assert len(events(stack, "wide")) == before


def test_the_upstreams_key_is_in_no_answer_and_in_no_file(
    stack: Stack, client: OpenAI, big: LiveUpstream
) -> None:
    said: list[str] = []
    for status in (400, 401, 403, 404, 429, 500):
        big.play(answers(status, f"you sent {BIG_KEY}, the key of this account"))
        for stream in (True, False):
            with pytest.raises(openai.APIStatusError) as caught:
                ask(client, "big", stream=stream)
            said.append(caught.value.response.text + str(caught.value.response.headers))
    big.play(sends_an_error_event)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, "big", stream=True)
    said.append(caught.value.response.text)
    said.append(httpx.get(f"{stack.base_url}/metrics").text)
    assert not [text for text in said if BIG_KEY in text]
    log = stack.worker_logs()
    assert "refuses this gateway with status 401" in log, "the operator is told"
    stack.wait_booked()
    files = [path for path in stack.home.rglob("*") if path.is_file()]
    assert len(files) > 20
    found = [path for path in (*files, stack.log) if BIG_KEY.encode() in path.read_bytes()]
    assert found == []
