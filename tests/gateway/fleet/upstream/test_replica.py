"""UpstreamReplica against a real server: what is sent, passed on and counted, and what fails."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import pytest

from gateway.fleet.errors import (
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnavailable,
    ReplicaUnreadable,
    UpstreamRefused,
)
from gateway.fleet.upstream import replica as upstream_module
from gateway.fleet.upstream import stream_bound
from gateway.fleet.upstream.errors import part_that_was_sent
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from gateway.generation_events import MeteredUsage, RawBody, ReplicaEvent
from tests.gateway.fleet.upstream.scripted_upstream import (
    API_KEY,
    COUNTED,
    UPSTREAM_MODEL,
    Exchange,
    Script,
    Upstream,
    chunk,
    chunks,
    completion,
    good_stream,
    run,
    texts,
)

Make = Callable[..., UpstreamReplica]
Chat = Callable[..., GenerateRequest]


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


async def test_done_may_be_missing(upstream: Upstream, make_replica: Make, chat: Chat) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hi"), chunk(finish="stop"))
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


EARLY_USAGE = {"prompt_tokens": 9, "completion_tokens": 2}


async def ends_early_after_usage(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("Hel"), chunk("lo", usage=EARLY_USAGE))
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
    "script",
    [
        cut_off,
        ends_early,
        ends_early_after_usage,
        error_event,
        broken_json,
        broken_text,
        endless_line,
    ],
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

    monkeypatch.setattr(stream_bound, "IDLE_TIMEOUT_S", 0.1)
    upstream.script = script
    with pytest.raises(ReplicaLost):
        await run(make_replica(), chat(stream=True))
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)


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
        (402, ReplicaUnavailable, 7.0),
        (202, ReplicaUnavailable, 7.0),
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
        host = upstream.base_url.split("/")[2]
        message = f"{UPSTREAM_MODEL} at {host} takes 8 tokens at most (token {API_KEY})"
        code = "context_length_exceeded"
        error = {"message": message, "type": "bad", "code": code, "param": "messages"}
        await exchange.answer({"error": error}, 400)

    upstream.script = script
    with pytest.raises(UpstreamRefused) as caught:
        await run(make_replica(), chat(stream=True))
    refused = caught.value
    assert refused.message == "big at *** takes 8 tokens at most (token ***)"
    assert (refused.status, refused.error_type) == (400, "invalid_request_error")
    assert (refused.error_code, refused.param) == ("context_length_exceeded", "messages")


def test_a_place_that_an_upstream_names_is_read_as_far_as_it_was_sent() -> None:
    sent = {"messages": [{"content": "a"}]}
    assert part_that_was_sent("messages.[0].content", sent) == "messages.[0].content"
    for index in ("9" * 5000, "1", "\u0663"):
        assert part_that_was_sent(f"messages[{index}].content", sent) == "messages"


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


async def cut_off(exchange: Exchange) -> None:
    await exchange.head(content_type="application/json", content_length="1000")
    await exchange.write(b'{"choices": [')
    exchange.writer.close()


async def compressed(exchange: Exchange) -> None:
    await exchange.answer(b"\x1f", content_encoding="gzip")


def saying(body: Any) -> Script:
    return lambda exchange: exchange.answer(body)


UNREADABLE = {
    "no JSON": saying(b"<html>"),
    "an array": saying(b"[]"),
    "no choice": saying({"choices": []}),
    "an error": saying({"error": {"message": "x"}}),
    "half of it": saying(json.dumps(completion()).encode()[:-20]),
    "cut off": cut_off,
    "compressed": compressed,
}


@pytest.mark.parametrize("script", UNREADABLE.values(), ids=UNREADABLE)
async def test_an_answer_that_cannot_be_read_is_told_from_none(
    upstream: Upstream, make_replica: Make, chat: Chat, script: Script
) -> None:
    upstream.script = script
    for stream in (False, True):
        with pytest.raises(ReplicaUnreadable):
            await run(make_replica(), chat(stream=stream))


@pytest.mark.parametrize("stream", [True, False])
async def test_no_more_choices_are_read_than_were_asked_for(
    upstream: Upstream, make_replica: Make, chat: Chat, stream: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        if not stream:
            return await exchange.answer(completion(choices=completion()["choices"] * 3))
        await exchange.begin_stream()
        await exchange.send({**chunk("a"), "choices": chunk("a")["choices"] * 3}, "[DONE]")
        await exchange.end_stream()

    upstream.script = script
    with pytest.raises(ReplicaUnavailable, match="3 choices of 2"):
        await run(make_replica(), chat(stream=stream, n=2))


@pytest.mark.parametrize("form", ["Bearer{0}x", "{0}", "Basic {b64}=", "k={quoted}&a=1"])
async def test_the_key_is_hidden_however_it_is_said_back(
    upstream: Upstream, make_replica: Make, chat: Chat, form: str
) -> None:
    key = "sk-up/stream+very-secret"
    in_base64 = base64.b64encode(key.encode()).decode()
    said = form.format(key, b64=in_base64, quoted=quote(key, safe=""))

    async def script(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": f"bad header {said}"}}, 400)

    upstream.script = script
    with pytest.raises(UpstreamRefused) as raised:
        await run(make_replica(api_key=key), chat())
    told = str(raised.value)
    assert told.startswith("bad header ") and "***" in told
    assert "secret" not in told and in_base64 not in told


async def test_a_body_has_a_bound(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b" " * 100_000 + json.dumps(completion()).encode())

    monkeypatch.setattr(upstream_module, "MAX_BODY_BYTES", 50_000)
    upstream.script = script
    with pytest.raises(ReplicaUnavailable, match="50000 bytes"):
        await run(make_replica(), chat())


async def test_the_worst_case_to_hold(make_replica: Make, chat: Chat) -> None:
    replica = make_replica(context_window=1000)
    given = await replica.prepare(chat(max_tokens=10, max_completion_tokens=20, n=3))
    assert (given.max_output_tokens, given.max_tokens_given) == (60, True)
    open_ended = await replica.prepare(chat(n=2))
    assert open_ended.max_output_tokens == 2 * (1000 - open_ended.input_tokens)
    assert not open_ended.max_tokens_given


async def test_a_tokenizer_counts_better_than_a_length(make_replica: Make, chat: Chat) -> None:
    def words(text: str) -> list[int]:
        return [0] * len(text.split())

    messages = [{"role": "user", "content": "seven words are in this long sentence"}]
    counted = await make_replica(encoding=words).prepare(chat(messages=messages))
    assert counted.input_tokens == 7 + 4
