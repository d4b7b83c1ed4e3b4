"""engine.client over a real socket, and engine.fake beside it: one contract, two engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

import engine.client
import engine.server
from engine.client import Engine, EngineClient, OutputStream
from engine.errors import (
    ContextLengthExceeded,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
)
from engine.fake import EOS_TOKEN_ID, FAKE_CONFIG, FakeCore, FakeEngine, drawn
from engine.frames import encode_frame
from engine.protocol import (
    EngineOutput,
    EngineRequest,
    OrphanedUsage,
    SamplingParams,
    Usage,
)
from engine.server import EngineServer

Serve = Callable[..., Awaitable[EngineServer]]
SMALL = msgspec.structs.replace(FAKE_CONFIG, max_num_seqs=4, max_waiting=4, status_interval_s=0.02)
LONG = 4000
"""As max_tokens: more than `paced` gets through while a test runs."""


def paced(request: EngineRequest, index: int) -> Iterator[int]:
    """As `drawn`; a LONG request takes its time, at least 8 s."""
    for token_id in drawn(request, index):
        if request.sampling.max_tokens == LONG:
            time.sleep(0.002)
        yield token_id


def ask(
    request_id: str = "r",
    prompt: list[int] | None = None,
    n: int = 1,
    salt: str = "",
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt or [1, 2, 3],
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        n=n,
        cache_salt=salt,
    )


async def collect(engine: Engine, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(request)]


def text(outputs: list[EngineOutput], index: int = 0) -> list[int]:
    return [id_ for o in outputs if o.index == index for id_ in o.token_ids]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


# ---- the contract, kept by both


@pytest_asyncio.fixture(params=["client", "fake"])
async def core_and_engine(
    request: pytest.FixtureRequest, serve: Serve
) -> AsyncIterator[tuple[FakeCore, Engine]]:
    core = FakeCore(SMALL, respond=paced)
    connected: Engine
    if request.param == "client":
        server = await serve(core)
        connected = await EngineClient.connect(server.address, timeout_s=5)
    else:
        connected = FakeEngine(core)
    yield core, connected
    await connected.close()


@pytest_asyncio.fixture
async def any_engine(core_and_engine: tuple[FakeCore, Engine]) -> Engine:
    return core_and_engine[1]


async def test_outputs_come_until_one_is_finished(any_engine: Engine) -> None:
    request = ask(max_tokens=40)
    outputs = await collect(any_engine, request)
    assert text(outputs) == list(islice(drawn(request, 0), 40))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage == Usage(prompt_tokens=3, generated_tokens=40, prefilled=True)
    generated = [o.usage.generated_tokens for o in outputs]
    assert generated == sorted(generated)


async def test_a_second_prompt_finds_the_first_ones_blocks(any_engine: Engine) -> None:
    prompt = list(range(1, 65))
    cached = [
        (await collect(any_engine, ask(f"r{i}", prompt, salt=salt)))[-1].usage.cached_tokens
        for i, salt in enumerate("aab")
    ]
    assert cached == [0, 48, 0]  # at least one token is computed, and no tenant sees another's


async def test_choices_stop_ids_and_logprobs(any_engine: Engine) -> None:
    first_two = list(islice(drawn(ask(seed=1), 0), 2))
    outputs = await collect(
        any_engine, ask(n=2, seed=1, logprobs=3, stop_token_ids=(first_two[1],))
    )
    assert text(outputs, 0) == first_two
    assert text(outputs, 1) == list(islice(drawn(ask(seed=1), 1), 8))
    assert {o.index: o.finish_reason for o in outputs if o.finish_reason} == {
        0: "stop",
        1: "length",
    }
    assert outputs[-1].usage.generated_tokens == 10
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 3 for entry in output.logprobs)


@pytest.mark.parametrize(
    ("bad", "error", "param"),
    [
        (ask(prompt=[99_999]), InvalidRequest, "prompt_token_ids"),
        (ask(prompt=[1] * 4096), ContextLengthExceeded, "prompt_token_ids"),
        (ask(max_tokens=0), InvalidRequest, "max_tokens"),
        (ask(n=0), InvalidRequest, "n"),
        (ask(n=300, max_tokens=250), InvalidRequest, "n"),
    ],
)
async def test_what_can_never_run_is_refused(
    any_engine: Engine, bad: EngineRequest, error: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(error) as refused:
        await collect(any_engine, bad)
    assert type(refused.value) is error
    assert refused.value.param == param
    assert await collect(any_engine, ask())  # nothing of it is left


async def test_an_id_in_use_is_refused_and_the_first_goes_on(any_engine: Engine) -> None:
    async with aclosing(any_engine.generate(ask(max_tokens=50))) as stream:
        outputs = [await anext(stream)]
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(any_engine, ask())
        outputs += [output async for output in stream]
    assert len(text(outputs)) == 50


async def test_abort_ends_a_stream_with_its_usage(
    core_and_engine: tuple[FakeCore, Engine],
) -> None:
    core, connected = core_and_engine
    outputs: list[EngineOutput] = []
    async for output in connected.generate(ask(max_tokens=LONG)):
        if not outputs:
            await connected.abort("r")
        outputs.append(output)
    assert outputs[-1].finished
    assert outputs[-1].finish_reason == "abort"
    assert outputs[-1].usage.generated_tokens == len(text(outputs)) < LONG
    assert outputs[-1].usage.prefilled
    await until(lambda: connected.status.num_running == 0)
    assert not core.has_work()
    await connected.abort("r")  # finished
    await connected.abort("never heard of")


async def test_closing_a_stream_early_aborts_it(
    core_and_engine: tuple[FakeCore, Engine],
) -> None:
    core, connected = core_and_engine
    async with aclosing(connected.generate(ask(max_tokens=LONG))) as stream:
        await anext(stream)
    await until(lambda: not core.has_work())
    assert core.status().generated_tokens < LONG
    await until(lambda: connected.status.num_running == 0)
    assert await collect(connected, ask("r2"))


async def test_many_streams_at_once(any_engine: Engine) -> None:
    requests = [ask(f"r{i}", [1 + i] * 20, max_tokens=1 + 9 * i) for i in range(4)]
    streams = await asyncio.gather(*(collect(any_engine, request) for request in requests))
    for request, outputs in zip(requests, streams, strict=True):
        expected = islice(drawn(request, 0), request.sampling.max_tokens)
        assert text(outputs) == list(expected)


async def test_a_closed_engine_is_unavailable(any_engine: Engine) -> None:
    await any_engine.close()
    assert not any_engine.connected
    with pytest.raises(EngineUnavailable):
        await collect(any_engine, ask())


# ---- the fake alone


async def test_a_script_and_the_end_of_it() -> None:
    fake = FakeEngine(FakeCore(respond=lambda request, index: iter([7, 8, 9])))
    outputs = await collect(fake, ask(max_tokens=50))
    assert text(outputs) == [7, 8, 9, EOS_TOKEN_ID]
    assert outputs[-1].finish_reason == "stop"


async def test_time_is_the_callers() -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await asyncio.sleep(0)

    await collect(FakeEngine(delay_s=3.0, sleep=sleep), ask(max_tokens=5))
    assert slept == [3.0] * 5


async def test_a_full_queue_is_overload() -> None:
    fake = FakeEngine(FakeCore(SMALL))
    streams = [fake.generate(ask(f"r{i}")) for i in range(9)]
    firsts = [asyncio.create_task(anext(stream)) for stream in streams]
    refused = [
        isinstance(result, EngineOverloaded)
        for result in await asyncio.gather(*firsts, return_exceptions=True)
    ]
    assert refused == [False] * 4 + [True] * 5
    for stream in streams:
        await stream.aclose()


async def test_a_lost_fake_fails_its_streams_and_comes_back() -> None:
    fake = FakeEngine()
    stream = fake.generate(ask(max_tokens=100))
    await anext(stream)
    fake.lose()
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    with pytest.raises(EngineUnavailable):
        await fake.wait_connected(0.01)
    fake.restore()
    assert (await fake.wait_connected(0.01)).num_running == 0
    assert len(text(await collect(fake, ask()))) == 8


async def test_a_script_that_raises_is_not_a_hang() -> None:
    def broken(request: EngineRequest, index: int) -> Any:
        yield 5
        raise ZeroDivisionError

    fake = FakeEngine(FakeCore(respond=broken))
    with pytest.raises(EngineUnavailable):
        await collect(fake, ask())
    assert fake._stepping is not None
    with pytest.raises(ZeroDivisionError):
        await fake._stepping


# ---- the client alone


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"No such file"):
        await EngineClient.connect(f"unix:{tmp_path}/none.sock", timeout_s=0.2)
    client = EngineClient(f"unix:{tmp_path}/none.sock")
    with pytest.raises(EngineUnavailable, match="not started"):
        _ = client.status


async def test_the_engine_may_come_up_later(serve: Serve, tmp_path: Path) -> None:
    client = EngineClient(f"unix:{tmp_path}/engine.sock")
    client.start()
    with pytest.raises(EngineUnavailable):
        await collect(client, ask())
    await serve(FakeCore(SMALL))
    assert (await client.wait_connected(5)).model == "fake"
    assert await collect(client, ask())
    await client.close()


async def test_a_lost_engine_fails_its_streams_and_is_found_again(serve: Serve) -> None:
    server = await serve(FakeCore(SMALL, respond=paced))
    client = await EngineClient.connect(server.address, timeout_s=5)
    first_id = client.status.engine_id
    stream = client.generate(ask(max_tokens=LONG))
    last = await anext(stream)
    closing = asyncio.create_task(server.close())
    with pytest.raises(EngineUnavailable, match="closed the connection"):
        async for last in stream:
            assert not last.finished
    assert last.usage.generated_tokens > 0  # what the consumer can bill
    assert not client.connected
    with pytest.raises(EngineUnavailable):
        await collect(client, ask("r2"))
    await client.abort("r2")
    await closing

    await serve(FakeCore(SMALL), server.address)
    assert (await client.wait_connected(5)).engine_id != first_id
    assert len(text(await collect(client, ask("r3")))) == 8
    await client.close()


@pytest.mark.parametrize("greeting", ["version", "outputs", "silence", "garbage"])
async def test_a_peer_that_is_no_engine_of_ours(
    greeting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.client, "CONNECT_TIMEOUT_S", 0.1)
    status = FakeCore().status()
    first = {
        "version": encode_frame(msgspec.structs.replace(status, protocol_version=99)),
        "outputs": encode_frame(OrphanedUsage(request_id="x", usage=Usage(prompt_tokens=1))),
        "silence": b"",
        "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    }[greeting]
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        await reader.read()
        writer.close()
        gone.set()

    listener = await asyncio.start_unix_server(answer, f"{tmp_path}/s")
    reason = {
        "version": "protocol 99",
        "outputs": "did not begin with its status",
        "silence": "TimeoutError",
        "garbage": "exceeds",
    }[greeting]
    with pytest.raises(EngineUnavailable, match=reason):
        await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=0.5)
    await asyncio.wait_for(gone.wait(), 5)
    listener.close()
    await listener.wait_closed()


async def test_an_engine_that_does_not_read_is_overloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.client, "MAX_WRITE_BUFFER_BYTES", 1024)
    release = asyncio.Event()

    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(FakeCore().status()))
        await release.wait()
        writer.close()

    listener = await asyncio.start_unix_server(greet_only, f"{tmp_path}/s", limit=1024)
    client = await EngineClient.connect(f"unix:{tmp_path}/s", timeout_s=5)
    big = ask("big", [70_000] * 2_000_000)
    stuck = asyncio.create_task(collect(client, big))
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="does not read"):
        await collect(client, ask())
    await client.close()
    with pytest.raises(EngineUnavailable):
        await stuck
    release.set()
    listener.close()
    await listener.wait_closed()


async def test_a_prompt_too_large_for_a_frame_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await EngineClient.connect((await serve(FakeCore(SMALL))).address, timeout_s=5)
    monkeypatch.setattr("engine.frames.MAX_FRAME_BYTES", 500)
    with pytest.raises(InvalidRequest) as refused:
        await collect(client, ask(prompt=[1000] * 250))
    assert refused.value.param == "prompt_token_ids"
    assert await collect(client, ask())
    await client.close()


# ---- orphans


async def leave_an_orphan(address: str, request_id: str) -> Usage:
    """Connect, generate a little and vanish; what was seen last."""
    client = await EngineClient.connect(address, timeout_s=5)
    output = await anext(stream := client.generate(ask(request_id, max_tokens=LONG)))
    await client.close()
    with pytest.raises(EngineUnavailable):
        async for later in stream:
            output = later
    return output.usage


async def test_orphaned_usage_is_offered_until_it_is_acked(serve: Serve) -> None:
    address = (await serve(FakeCore(SMALL, respond=paced))).address
    seen = await leave_an_orphan(address, "lost")
    offered: list[OrphanedUsage] = []

    async def refuse(orphan: OrphanedUsage) -> None:
        offered.append(orphan)
        raise OSError("disk full")

    async def decline(orphan: OrphanedUsage) -> bool:
        offered.append(orphan)
        return False

    async def accept(orphan: OrphanedUsage) -> None:
        offered.append(orphan)

    for number, on_orphan in enumerate([None, refuse, decline, accept], start=0):
        client = await EngineClient.connect(address, timeout_s=5, on_orphan=on_orphan)
        await until(lambda number=number: len(offered) == number)  # type: ignore[misc]
        assert await collect(client, ask(f"after-{number}"))  # an ack has arrived by now
        await client.close()
    assert {o.request_id for o in offered} == {"lost"}
    usage = offered[0].usage
    assert usage.prefilled and usage.prompt_tokens == 3
    assert seen.generated_tokens <= usage.generated_tokens < LONG
    client = await EngineClient.connect(address, timeout_s=5, on_orphan=accept)
    assert await collect(client, ask("last"))
    assert len(offered) == 3
    await client.close()


async def test_a_gateway_that_stays_is_offered_the_orphans_of_one_that_leaves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine.server, "ORPHAN_REOFFER_S", 0.05)
    address = (await serve(FakeCore(SMALL, respond=paced))).address
    offers = 0

    async def at_the_third_time(orphan: OrphanedUsage) -> None:
        nonlocal offers
        offers += 1
        if offers < 3:
            raise RuntimeError("not yet")

    stays = await EngineClient.connect(address, timeout_s=5, on_orphan=at_the_third_time)
    with caplog.at_level(logging.ERROR):
        await leave_an_orphan(address, "lost")
        await until(lambda: offers == 3)
    assert "the orphaned usage of lost was not recorded" in caplog.text
    await asyncio.sleep(0.2)
    assert offers == 3
    await stays.close()


# ---- merging


async def test_a_slow_consumer_gets_everything_in_few_outputs(serve: Serve) -> None:
    client = await EngineClient.connect((await serve(FakeCore(SMALL))).address, timeout_s=5)
    request = ask(n=2, max_tokens=200, logprobs=1)
    stream = client.generate(request)
    outputs = [await anext(stream)]
    await until(lambda: client.status.generated_tokens == 400)  # over, and nobody has read
    outputs += [output async for output in stream]
    assert len(outputs) <= 1 + 1 + 2  # the first, perhaps the rest of its frame, two merged ones
    for index in range(2):
        assert text(outputs, index) == list(islice(drawn(request, index), 200))
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
    assert outputs[-1].finished and outputs[-1].usage.generated_tokens == 400
    await client.close()


@given(data=st.data())
def test_merging_loses_and_reorders_nothing(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3), "n")
    steps = data.draw(st.lists(st.sampled_from([*range(n), "take"]), max_size=60), "steps")

    async def check() -> None:
        stream = OutputStream()
        pushed: dict[int, list[int]] = {index: [] for index in range(n)}
        taken: list[EngineOutput] = []
        generated = 0
        for step in [*steps, *range(n)]:
            if isinstance(step, int):
                generated += 1
                pushed[step].append(generated)
                usage = Usage(prompt_tokens=1, generated_tokens=generated)
                stream.push(
                    EngineOutput(request_id="r", usage=usage, index=step, token_ids=[generated])
                )
            elif len(taken) < generated and stream._pending:
                taken.append(await stream.next())
            assert len(stream._pending) <= n
        usage = Usage(prompt_tokens=1, generated_tokens=generated)
        stream.push(EngineOutput(request_id="r", usage=usage, finish_reason="abort", finished=True))
        while not stream.finished:
            taken.append(await stream.next())
        for index in range(n):
            assert text(taken, index) == pushed[index]
        counts = [output.usage.generated_tokens for output in taken]
        assert counts == sorted(counts) and counts[-1] == generated
        assert [output.finished for output in taken] == [False] * (len(taken) - 1) + [True]
        assert taken[-1].finish_reason == "abort"

    asyncio.run(check())


async def test_what_is_pending_comes_before_the_error() -> None:
    stream = OutputStream()
    stream.push(EngineOutput(request_id="r", usage=Usage(prompt_tokens=1), token_ids=[4]))
    stream.fail(EngineUnavailable("gone"))
    assert (await stream.next()).token_ids == [4]
    with pytest.raises(EngineUnavailable):
        await stream.next()
