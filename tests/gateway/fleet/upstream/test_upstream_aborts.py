"""Requests to an upstream that nobody waits for any more, and the bound on those that are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.fleet.errors import ReplicaOverloaded
from gateway.fleet.upstream import replica as replica_module
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generate_request import GenerateRequest
from tests.gateway.fleet.upstream.scripted_upstream import (
    COUNTED,
    Exchange,
    Upstream,
    chunk,
    completion,
    good_stream,
    run,
)
from tests.pace import pace

Make = Callable[..., UpstreamReplica]
Chat = Callable[..., GenerateRequest]


async def abort_soon(replica: UpstreamReplica, upstream: Upstream) -> float:
    """Abort once the server has the request; seconds until it saw the connection closed."""
    while not upstream.exchanges:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30), pace() as seconds:
        await replica.abort("attempt")
        await upstream.exchanges[0].left.wait()
        return seconds()


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
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)
    assert replica.health().num_running == 0


async def test_aborted_requests_do_not_use_up_the_pool(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "MAX_CONNECTIONS", 2)
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
    monkeypatch.setattr(replica_module, "MAX_CONNECTIONS", 1)
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
