"""UpstreamReplica against a real server: what is sent, what is passed on, what is counted, what
fails.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from gateway.fleet import upstream as upstream_module
from gateway.fleet.errors import (
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UpstreamRefused,
)
from gateway.fleet.replica import MeteredUsage, RawBody, RawChunk, ReplicaEvent
from gateway.fleet.upstream import UpstreamReplica
from gateway.wire.request import GenerateRequest
from tests.gateway.fleet.scripted_upstream import API_KEY, UPSTREAM_MODEL, Exchange, Upstream

Make = Callable[..., UpstreamReplica]
Chat = Callable[..., GenerateRequest]

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 4, "audio_tokens": None},
    "completion_tokens_details": {"reasoning_tokens": 2},
    "cost": 0.0123,
}
COUNTED = MeteredUsage(
    uncached_input=8, cache_read=8, cache_write=4, output=5, reasoning_output=2, estimated=False
)


def chunk(text: str | None = None, *, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        "usage": None,
        **extra,
    }


def usage_chunk() -> dict[str, Any]:
    return {**chunk(), "choices": [], "usage": USAGE}


def completion(**extra: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hello there", "refusal": None}
    return {
        "id": "chatcmpl-theirs",
        "object": "chat.completion",
        "created": 7,
        "model": UPSTREAM_MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
        **extra,
    }


async def run(
    replica: UpstreamReplica, request: GenerateRequest, events: list[ReplicaEvent] | None = None
) -> list[ReplicaEvent]:
    """All events; those before an error are in `events`."""
    events = [] if events is None else events
    prepared = await replica.prepare(request)
    stream = replica.stream(prepared, attempt_id="attempt", cache_salt="salt")
    async with aclosing(stream):
        async for event in stream:
            events.append(event)
    return events


def chunks(events: list[ReplicaEvent]) -> list[Any]:
    items = [item for event in events for item in event.items]
    return [json.loads(item.payload) for item in items if isinstance(item, RawChunk)]


def texts(events: list[ReplicaEvent]) -> list[str]:
    """The content of every chunk that was passed on."""
    choices = [choice for chunk in chunks(events) for choice in chunk["choices"]]
    return [choice["delta"]["content"] for choice in choices if "content" in choice["delta"]]


async def good_stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk(""), chunk("Hel"), chunk("lo"), chunk(finish="stop"), usage_chunk())
    await exchange.send("[DONE]")
    await exchange.end_stream()


async def test_a_stream_is_passed_on_under_our_name_and_counted(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = good_stream
    events = await run(make_replica(), chat(stream=True, temperature=0.5, vendor_extra=[1]))
    assert texts(events) == ["", "Hel", "lo"]
    for payload in chunks(events):
        assert payload["model"] == "big"
        assert payload["id"] == "chatcmpl-theirs"
        assert "usage" not in payload
    assert [event.finished for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage == COUNTED
    assert all(event.usage is not None and event.usage.estimated for event in events[:-2])


async def test_what_is_sent(upstream: Upstream, make_replica: Make, chat: Chat) -> None:
    upstream.script = good_stream
    options = {"include_usage": False, "vendor": 1}
    await run(make_replica(), chat(stream=True, stream_options=options, vendor_extra=[1]))
    exchange = upstream.exchanges[0]
    assert exchange.headers["authorization"] == f"Bearer {API_KEY}"
    assert exchange.headers["accept-encoding"] == "identity"
    assert exchange.body == {
        "model": UPSTREAM_MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True, "vendor": 1},
        "vendor_extra": [1],
    }


async def test_without_a_key_none_is_sent(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = good_stream
    await run(make_replica(api_key=None), chat(stream=True))
    assert "authorization" not in upstream.exchanges[0].headers


async def test_chunks_are_not_held_back(upstream: Upstream, make_replica: Make, chat: Chat) -> None:
    may_go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("first"))
        await may_go_on.wait()
        await exchange.send(chunk("second"), chunk(finish="stop"), "[DONE]")
        await exchange.end_stream()

    upstream.script = script
    replica = make_replica()
    prepared = await replica.prepare(chat(stream=True))
    async with aclosing(replica.stream(prepared, attempt_id="a", cache_salt="")) as events:
        assert texts([await anext(events)]) == ["first"]
        may_go_on.set()
        assert texts([event async for event in events]) == ["second"]


async def test_a_connection_is_used_again(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = good_stream
    replica = make_replica()
    for _ in range(3):
        await run(replica, chat(stream=True))
    assert upstream.num_connections == 1


async def test_without_usage_the_estimate_stands_and_says_so(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(*(chunk(f"w{i} ") for i in range(10)), chunk(finish="stop"), "[DONE]")
        await exchange.end_stream()

    upstream.script = script
    events = await run(make_replica(), chat(stream=True))
    usage = events[-1].usage
    assert usage is not None and usage.estimated
    assert usage.output == 10
    assert usage.prompt_tokens >= 1


async def test_a_usage_of_zero_is_no_count(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    nothing = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("some"), chunk(" text", finish="stop", usage=nothing), "[DONE]")
        await exchange.end_stream()

    upstream.script = script
    events = await run(make_replica(), chat(stream=True))
    assert events[-1].usage == MeteredUsage(uncached_input=3, output=2, estimated=True)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "with usage"])
async def test_done_may_be_missing(
    upstream: Upstream, make_replica: Make, chat: Chat, finished: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hi"), chunk(finish="stop") if finished else usage_chunk())
        await exchange.end_stream()

    upstream.script = script
    events = await run(make_replica(), chat(stream=True))
    assert events[-1].finished


async def cut_off(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"))
    exchange.writer.close()


async def ends_early(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"))
    await exchange.end_stream()


async def error_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"), {"error": {"message": "secret detail"}})
    await exchange.hang()


async def broken_json(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"), b"data: {not json}\n\n")
    await exchange.hang()


async def broken_text(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"), b'data: {"id":"\xff","choices":[]}\n\n')
    await exchange.hang()


async def endless_line(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo"))
    for _ in range(100):
        await exchange.send(b"x" * 65536)


@pytest.mark.parametrize(
    "script", [cut_off, ends_early, error_event, broken_json, broken_text, endless_line]
)
async def test_a_fault_after_the_first_chunk_is_a_loss_and_what_came_counts(
    upstream: Upstream, make_replica: Make, chat: Chat, script: Any
) -> None:
    upstream.script = script
    events: list[ReplicaEvent] = []
    with pytest.raises(ReplicaLost) as caught:
        await run(make_replica(), chat(stream=True), events)
    assert texts(events) == ["Hel", "lo"]
    assert events[-1].usage is not None and events[-1].usage.output == 2
    assert not events[-1].finished
    assert "secret detail" not in str(caught.value)


async def test_an_error_event_before_the_first_chunk_lets_another_replica_try(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send({"error": {"message": "no slot"}})
        await exchange.hang()

    upstream.script = script
    with pytest.raises(ReplicaUnavailable):
        await run(make_replica(), chat(stream=True))


async def test_a_silent_stream_is_given_up(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"))
        await exchange.hang()

    monkeypatch.setattr(upstream_module, "STREAM_IDLE_TIMEOUT_S", 0.1)
    upstream.script = script
    with pytest.raises(ReplicaLost):
        await run(make_replica(), chat(stream=True))
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "kind", "retry_after_s"),
    [
        (429, ReplicaOverloaded, 7.0),
        (503, ReplicaOverloaded, 7.0),
        (500, ReplicaUnavailable, 7.0),
        (401, ReplicaUnavailable, 7.0),
        (403, ReplicaUnavailable, 7.0),
        (404, ReplicaUnavailable, 7.0),
        (302, ReplicaUnavailable, 7.0),
    ],
)
async def test_what_is_not_the_clients_fault_lets_another_replica_try(
    upstream: Upstream,
    make_replica: Make,
    chat: Chat,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    status: int,
    kind: type[ReplicaUnavailable],
    retry_after_s: float,
) -> None:
    async def script(exchange: Exchange) -> None:
        body = {"error": {"message": f"Incorrect API key provided: {API_KEY}"}}
        await exchange.answer(body, status, retry_after="7")

    upstream.script = script
    with pytest.raises(kind) as caught:
        await run(make_replica(), chat(stream=stream))
    assert caught.value.retry_after_s == retry_after_s
    assert API_KEY not in str(caught.value)
    assert API_KEY not in caplog.text


async def test_a_refusal_of_the_request_is_passed_on_without_our_secrets(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        message = f"{UPSTREAM_MODEL} takes 8 tokens at most (token {API_KEY})"
        code = "context_length_exceeded"
        error = {"message": message, "type": "bad", "code": code, "param": "messages"}
        await exchange.answer({"error": error}, 400)

    upstream.script = script
    with pytest.raises(UpstreamRefused) as caught:
        await run(make_replica(), chat(stream=True))
    refused = caught.value
    assert refused.message == "big takes 8 tokens at most (token ***)"
    assert (refused.status, refused.error_type) == (400, "bad")
    assert (refused.error_code, refused.param) == ("context_length_exceeded", "messages")


async def test_nobody_listens(make_replica: Make, chat: Chat, upstream: Upstream) -> None:
    upstream.script = good_stream
    replica = make_replica(base_url="http://127.0.0.1:9/v1")
    for stream in (True, False):
        with pytest.raises(ReplicaUnavailable):
            await run(replica, chat(stream=stream))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_connection_closed_before_the_answer_lets_another_replica_try(
    upstream: Upstream, make_replica: Make, chat: Chat, stream: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.writer.close()

    upstream.script = script
    with pytest.raises(ReplicaUnavailable):
        await run(make_replica(), chat(stream=stream))


async def test_a_whole_answer(upstream: Upstream, make_replica: Make, chat: Chat) -> None:
    async def script(exchange: Exchange) -> None:
        assert "stream_options" not in exchange.body
        await exchange.answer(completion())

    upstream.script = script
    [event] = await run(make_replica(), chat())
    [item] = event.items
    assert isinstance(item, RawBody)
    expected = completion(model="big")
    del expected["usage"]
    assert json.loads(item.payload) == expected
    assert (event.usage, event.finished) == (COUNTED, True)


async def test_a_whole_answer_without_usage(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(completion(usage=None))

    upstream.script = script
    [event] = await run(make_replica(), chat())
    assert event.usage is not None and event.usage.estimated
    assert event.usage.output == 2  # 11 bytes


@pytest.mark.parametrize("body", [b"<html>", b"[]", {"choices": []}, {"error": {"message": "x"}}])
async def test_a_whole_answer_that_is_none(
    upstream: Upstream, make_replica: Make, chat: Chat, body: Any
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(body)

    upstream.script = script
    with pytest.raises(ReplicaUnavailable):
        await run(make_replica(), chat())


async def test_a_body_has_a_bound(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b" " * 100_000 + json.dumps(completion()).encode())

    monkeypatch.setattr(upstream_module, "MAX_BODY_BYTES", 50_000)
    upstream.script = script
    with pytest.raises(ReplicaUnavailable, match="50000 bytes"):
        await run(make_replica(), chat())


async def abort_soon(replica: UpstreamReplica, upstream: Upstream) -> float:
    """Abort once the server has the request; seconds until it saw the connection closed."""
    while not upstream.exchanges:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    begun_at = time.monotonic()
    await replica.abort("attempt")
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 1)
    return time.monotonic() - begun_at


async def test_an_aborted_stream_is_cut_off_and_what_came_is_billed(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(*(chunk("word words ") for _ in range(6)))
        await exchange.hang()

    upstream.script = script
    replica = make_replica()
    running = asyncio.create_task(run(replica, chat(stream=True)))
    assert await abort_soon(replica, upstream) < 1
    events = await running
    assert events[-1].finished
    assert events[-1].usage is not None and events[-1].usage.estimated
    assert events[-1].usage.output == 66 // 5  # by bytes, which is more than by chunks


async def test_an_aborted_stream_that_has_not_begun_pays_for_its_input(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    upstream.script = Exchange.hang
    replica = make_replica()
    running = asyncio.create_task(run(replica, chat(stream=True)))
    assert await abort_soon(replica, upstream) < 1
    [event] = await running
    assert event.usage is not None and event.usage.estimated
    assert event.usage.output == 0 and event.usage.prompt_tokens > 0


async def test_an_aborted_whole_answer_is_billed_by_the_measured_rate(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    now = [100.0]

    async def answers_in_two_seconds(exchange: Exchange) -> None:
        now[0] += 2.0
        await exchange.answer(completion())  # 5 tokens: 2.5 tokens/s

    replica = make_replica(clock=lambda: now[0])
    upstream.script = answers_in_two_seconds
    await run(replica, chat())
    upstream.exchanges.clear()

    async def hangs_for_ten_seconds(exchange: Exchange) -> None:
        now[0] += 10.0
        await exchange.hang()

    upstream.script = hangs_for_ten_seconds
    for max_tokens, output in ((100, 25), (7, 7)):
        running = asyncio.create_task(run(replica, chat(max_tokens=max_tokens)))
        assert await abort_soon(replica, upstream) < 1
        [event] = await running
        assert event.finished and event.usage is not None and event.usage.estimated
        assert event.usage.output == output
        upstream.exchanges.clear()


async def test_an_attempt_aborted_before_it_was_sent_costs_nothing(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    replica = make_replica()
    prepared = await replica.prepare(chat(stream=True))
    events = replica.stream(prepared, attempt_id="attempt", cache_salt="")
    running = asyncio.create_task(anext(events))
    await asyncio.sleep(0)  # it connects
    await replica.abort("attempt")
    event = await running
    assert (event.usage, event.finished) == (None, True)
    assert upstream.exchanges == []
    await events.aclose()


async def test_an_unknown_attempt_is_ignored(make_replica: Make) -> None:
    await make_replica().abort("never seen")


async def test_a_reader_that_leaves_closes_the_connection(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"))
        await exchange.hang()

    upstream.script = script
    replica = make_replica()
    prepared = await replica.prepare(chat(stream=True))
    events = replica.stream(prepared, attempt_id="attempt", cache_salt="")
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 1)
    assert replica.health().num_running == 0


async def test_aborted_requests_do_not_use_up_the_pool(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "MAX_CONNECTIONS", 2)
    replica = make_replica()
    upstream.script = Exchange.hang
    for stream in (True, False) * 3:
        running = asyncio.create_task(run(replica, chat(stream=stream)))
        await abort_soon(replica, upstream)
        await running
        upstream.exchanges.clear()
    upstream.script = good_stream
    events = await run(replica, chat(stream=True))
    assert events[-1].usage == COUNTED


async def test_the_pool_is_bounded(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(upstream_module, "POOL_TIMEOUT_S", 0.1)
    replica = make_replica()
    upstream.script = Exchange.hang
    running = asyncio.create_task(run(replica, chat()))
    while not upstream.exchanges:
        await asyncio.sleep(0.005)
    second = replica.stream(await replica.prepare(chat()), attempt_id="second", cache_salt="")
    with pytest.raises(ReplicaOverloaded):
        await anext(second)
    await replica.abort("attempt")
    await running


async def test_the_worst_case_to_hold(make_replica: Make, chat: Chat) -> None:
    replica = make_replica(context_window=1000)
    given = await replica.prepare(chat(max_tokens=10, max_completion_tokens=20, n=3))
    assert (given.max_output_tokens, given.max_tokens_given) == (60, True)
    open_ended = await replica.prepare(chat(n=2))
    assert open_ended.max_output_tokens == 2 * (1000 - open_ended.input_tokens)
    assert (open_ended.max_tokens_given, open_ended.input_estimated) == (False, True)


async def test_a_tokenizer_counts_better_than_a_length(make_replica: Make, chat: Chat) -> None:
    class Words:
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            return [0] * len(text.split())

    messages = [{"role": "user", "content": "seven words are in this long sentence"}]
    counted = await make_replica(encoding=Words()).prepare(chat(messages=messages))
    assert counted.input_tokens == 7 + 4
