"""Streams of an upstream that hold much around little text, or never end: bounded in bytes and in
time, and a client that has its whole answer hears no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.fleet.errors import ReplicaLost, ReplicaUnavailable
from gateway.fleet.upstream import replica as replica_module
from gateway.fleet.upstream import stream_bound
from gateway.fleet.upstream.meter import BrokenAnswer
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.fleet.upstream.stream_bound import END_S, SILENCE_S, StreamBound
from gateway.generate_request import GenerateRequest
from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Upstream,
    chunk,
    new_meter,
    run,
    texts,
)

Chat = Callable[..., GenerateRequest]
Make = Callable[..., UpstreamReplica]


def padded(text: str | None) -> dict[str, Any]:
    return {**chunk(text), "id": "x" * 5000}


def bare(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize(
    "event",
    [
        b": nothing\n\n" * 100,
        b"\n" * 1000,
        b"event: x\n\n" * 100,
        padded(None),
        bare(role="a" * 5000),
        {"choices": [], "usage": {"prompt_tokens": 7, "x": "y" * 5000}},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "s" * 5000}] * 2},
    ],
    ids=["comments", "lines", "names", "ids", "roles", "usage", "choices"],
)
async def test_a_stream_has_a_bound_around_its_text(
    upstream: Upstream,
    make_replica: Make,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
    event: Any,
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.flood(event)

    monkeypatch.setattr(stream_bound, "LEAST_BYTES", 100_000)
    monkeypatch.setattr(stream_bound, "BYTES_PER_TOKEN", 1000)
    upstream.script = script
    with pytest.raises((ReplicaLost, ReplicaUnavailable)):
        await run(make_replica(), chat(stream=True, max_tokens=5))
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)


async def test_what_it_may_write_widens_the_bound(
    upstream: Upstream, make_replica: Make, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(*(padded("word ") for _ in range(40)), chunk(finish="stop"), "[DONE]")
        await exchange.end_stream()

    monkeypatch.setattr(stream_bound, "LEAST_BYTES", 1000)
    monkeypatch.setattr(stream_bound, "BYTES_PER_TOKEN", 6000)
    upstream.script = script
    events = await run(make_replica(), chat(stream=True, max_tokens=40))
    assert texts(events) == ["word "] * 40


@pytest.mark.parametrize("says", [b": nothing\n\n", None])
async def test_a_whole_answer_does_not_wait_for_a_usage_that_never_comes(
    upstream: Upstream,
    make_replica: Make,
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
    says: bytes | None,
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"), chunk("lo", finish="stop"))
        await (exchange.hang() if says is None else exchange.flood(says))

    monkeypatch.setattr(stream_bound, "END_S", 0.1)
    upstream.script = script
    events = await run(make_replica(), chat(stream=True, max_tokens=5))
    assert texts(events) == ["Hel", "lo"]
    usage = events[-1].usage
    assert events[-1].finished and usage is not None and usage.output == 2 and usage.estimated


async def test_what_comes_behind_the_end_is_read_for_a_while(
    make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it comes so fast that no read ever waits."""

    class Flood:
        reads = 0

        async def read(self, timeout_s: float) -> bytes:
            self.reads += 1
            assert self.reads < 100_000, "without an end"
            await asyncio.sleep(0)
            return b": nothing\n\n"

    monkeypatch.setattr(replica_module, "AFTER_DONE_TIMEOUT_S", 0.01)
    await make_replica()._to_the_end(Flood())  # type: ignore[arg-type]


def test_a_stream_without_text_ends() -> None:
    """However often it says that it lives."""
    now = [0.0]
    meter = new_meter()
    bound = StreamBound(20, lambda: now[0])
    meter.read_event(b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}')
    while now[0] < 100:
        now[0] += 50
        bound.note(10, meter)
    now[0] = 50 + SILENCE_S
    bound.note(10, meter)
    now[0] += 1
    with pytest.raises(BrokenAnswer, match="no text for 600 s"):
        bound.note(10, meter)


def test_the_usage_has_its_time() -> None:
    now = [0.0]
    meter = new_meter()
    bound = StreamBound(20, lambda: now[0])
    assert (bound.read_s, bound.is_over) == (stream_bound.IDLE_TIMEOUT_S, False)
    meter.read_event(b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}')
    bound.note(10, meter)
    now[0] = END_S / 2
    bound.note(10, meter)
    assert (bound.read_s, bound.is_over) == (END_S / 2, False)
    now[0] = END_S
    assert (bound.read_s, bound.is_over) == (0.0, True)
