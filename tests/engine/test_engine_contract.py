"""One contract, two engines: engine.transport.client over a real socket, and engine.fake.engine."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import islice
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    TakenBack,
)
from engine.fake.engine import EOS_TOKEN_ID, FakeCore, FakeEngine, drawn, embedding
from engine.protocol import (
    EngineOutput,
    EngineRequest,
    SeenPrefix,
    Usage,
)
from engine.transport.client import Engine, EngineClient
from tests.engine.peers import (
    LONG,
    SMALL,
    Serve,
    ask,
    collect,
    paced,
    text,
    until,
)

# ---- the contract, kept by both


@pytest_asyncio.fixture(params=["client", "fake"])
async def core_and_engine(
    request: pytest.FixtureRequest, serve: Serve
) -> AsyncIterator[tuple[FakeCore, Engine]]:
    core = FakeCore(SMALL, respond=paced)
    connected: Engine
    if request.param == "client":
        server = await serve(core)
        connected = await EngineClient.connect(server.address, timeout_s=30)
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


async def test_an_engine_tells_where_a_prompt_left_the_one_before(any_engine: Engine) -> None:
    prompt = list(range(1, 65))
    asked = [
        ask("first", prompt),
        ask("changed", [*prompt[:37], 99, *prompt[38:]]),
        ask("longer", [*prompt, 99]),
        ask("again", prompt),
        ask("stranger", prompt, salt="b"),
    ]
    assert [(await collect(any_engine, each))[-1].usage.seen for each in asked] == [
        None,
        SeenPrefix(37, "broken"),
        SeenPrefix(64, "continued"),
        SeenPrefix(64, "repeated"),
        None,
    ]


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
        (ask(temperature=-1), InvalidRequest, "temperature"),
        (ask(stop_token_ids=(99_999,)), InvalidRequest, "stop_token_ids"),
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


async def test_an_abort_ends_every_open_choice_and_counts_once(any_engine: Engine) -> None:
    stop = next(drawn(ask(seed=1), 1))
    outputs: list[EngineOutput] = []
    request = ask(n=3, seed=1, max_tokens=LONG, stop_token_ids=(stop,))
    async for output in any_engine.generate(request):
        outputs.append(output)
        if len(outputs) == 6:
            await any_engine.abort("r")
    reasons = [(o.index, o.finish_reason) for o in outputs if o.finish_reason]
    assert sorted(reasons) == [(0, "abort"), (1, "stop"), (2, "abort")]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    usage = outputs[-1].usage
    assert usage.generated_tokens == sum(len(o.token_ids) for o in outputs)
    assert usage.prompt_tokens == 3


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


async def test_an_embedding_is_one_output(any_engine: Engine) -> None:
    found = []
    for i, prompt in enumerate(([1, 2, 3] * 20, [1, 2, 3] * 20, [4])):
        request = EngineRequest(request_id=f"r{i}", prompt_token_ids=prompt, embed=True)
        (output,) = await collect(any_engine, request)
        assert output.embedding == embedding(request) and output.token_ids == []
        assert (output.finish_reason, output.finished) == ("stop", True)
        cached_tokens = 48 if i == 1 else 0
        seen = SeenPrefix(60, "repeated") if i == 1 else None
        assert output.usage == Usage(
            prompt_tokens=len(prompt), cached_tokens=cached_tokens, seen=seen, prefilled=True
        )
        numbers = struct.unpack(f"<{any_engine.status.embedding_size}f", output.embedding)
        assert math.hypot(*numbers) == pytest.approx(1)
        found.append(numbers)
        await any_engine.acknowledge(request.request_id)
    assert found[0] == found[1] != found[2]
    request = EngineRequest(request_id="cut", prompt_token_ids=[4], embed=True, dimensions=3)
    (output,) = await collect(any_engine, request)
    assert output.embedding is not None
    cut = struct.unpack("<3f", output.embedding)
    length = math.hypot(*found[2][:3])
    assert cut == pytest.approx([number / length for number in found[2][:3]])


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"n": 2}, "n"), ({"dimensions": 17}, "dimensions"), ({"embed": False}, "max_tokens")],
)
async def test_an_embedding_is_refused_by_field(
    any_engine: Engine, changes: dict[str, Any], param: str
) -> None:
    asked = {"request_id": "r", "prompt_token_ids": [1], "embed": True} | changes
    with pytest.raises(InvalidRequest) as refused:
        await collect(any_engine, EngineRequest(**asked))
    assert refused.value.param == param


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


async def test_a_fake_without_a_head_only_embeds() -> None:
    fake = FakeEngine(FakeCore(generates=False))
    assert fake.status.generates is False
    request = EngineRequest(request_id="r", prompt_token_ids=[1], embed=True)
    assert (await collect(fake, request))[0].embedding is not None
    with pytest.raises(InvalidRequest) as refused:
        await collect(fake, ask())
    assert refused.value.param == "embed"


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


# ---- lanes, pauses, deadlines


async def test_a_paused_request_says_nothing_until_it_goes_on(
    core_and_engine: tuple[FakeCore, Engine],
) -> None:
    core, any_engine = core_and_engine
    outputs = any_engine.generate(ask("p", max_tokens=LONG))
    await anext(outputs)
    await any_engine.pause("p")
    await until(lambda: not core.has_work())
    assert (await collect(any_engine, ask("q", max_tokens=20)))[-1].finished
    assert any_engine.status.lanes["interactive"].num_running == 1
    await any_engine.resume("p")
    before = (await anext(outputs)).usage.generated_tokens
    assert (await anext(outputs)).usage.generated_tokens > before
    await any_engine.pause("p")
    await any_engine.abort("p")
    last = [output async for output in outputs][-1]
    assert last.finish_reason == "abort"
    await any_engine.pause("p")  # nobody any more
    await any_engine.resume("p")


async def test_a_lane_above_is_begun_first_and_tenants_take_turns(any_engine: Engine) -> None:
    asked = [msgspec.structs.replace(ask(f"x{i}", max_tokens=LONG), lane="batch") for i in range(4)]
    blockers = [asyncio.create_task(collect(any_engine, each)) for each in asked]
    await until(lambda: any_engine.status.num_running == 4)
    begun: list[str] = []

    async def one(name: str, lane: str, tenant: str) -> None:
        asked = ask(name, max_tokens=40)
        asked = msgspec.structs.replace(asked, lane=lane, tenant=tenant)
        async with aclosing(any_engine.generate(asked)) as outputs:
            async for _ in outputs:
                if name not in begun:
                    begun.append(name)

    turns = [
        ("b", "batch", "t"),
        ("i1", "interactive", "t"),
        ("i2", "interactive", "t"),
        ("i3", "interactive", "u"),
    ]
    others = [asyncio.create_task(one(*turn)) for turn in turns]
    await until(lambda: any_engine.status.num_waiting == 4)
    assert any_engine.status.lanes["batch"].num_waiting == 1
    await any_engine.abort("x0")  # one place, for all of them in turn
    await asyncio.gather(*others)
    assert begun == ["i1", "i3", "i2", "b"]
    for i in range(1, 4):
        await any_engine.abort(f"x{i}")
    await asyncio.gather(*blockers)


async def test_what_is_not_begun_by_its_deadline_is_refused(any_engine: Engine) -> None:
    blockers = [
        asyncio.create_task(collect(any_engine, ask(f"x{i}", max_tokens=LONG))) for i in range(4)
    ]
    await until(lambda: any_engine.status.num_running == 4)
    late = msgspec.structs.replace(ask("late"), deadline_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await collect(any_engine, late)
    for i in range(4):
        await any_engine.abort(f"x{i}")
    await asyncio.gather(*blockers)


async def test_what_has_not_begun_is_given_back_and_what_has_goes_on(
    core_and_engine: tuple[FakeCore, Engine],
) -> None:
    core, any_engine = core_and_engine
    blockers = [
        asyncio.create_task(collect(any_engine, ask(f"x{i}", max_tokens=LONG))) for i in range(4)
    ]
    await until(lambda: any_engine.status.num_running == 4)
    waits = asyncio.create_task(collect(any_engine, ask("waits")))
    await until(lambda: any_engine.status.num_waiting == 1)
    for each in ("x0", "waits", "waits", "unknown"):
        any_engine.take_back(each)
    with pytest.raises(TakenBack):
        await waits
    for i in range(4):
        await any_engine.abort(f"x{i}")
    ended = await asyncio.gather(*blockers)
    assert all(each[-1].finish_reason == "abort" for each in ended)
    assert (await collect(any_engine, ask("waits")))[-1].finished, "its id is free again"
    await until(lambda: not core.has_work())
