"""Lanes, pauses, deadlines and aborts through a socket: the real client, server and scheduler, and
a model that says one token to everybody."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine.errors import DeadlineExceeded, EngineOverloaded, InvalidRequest
from engine.fake.engine import FAKE_CONFIG, FakeCore
from engine.protocol import EngineOutput, EngineRequest, ReplicaStatus
from engine.scheduling.lanes import LaneLimits
from engine.transport.client import EngineClient
from tests.engine.peers import Serve, collect, until
from tests.engine.scheduling.scheduling import make, request


class ScheduledCore(FakeCore):
    """Steps are of the real scheduler. Every step is checked."""

    def __init__(self, *, step_s: float = 0.0, **bounds: Any) -> None:
        super().__init__(msgspec.structs.replace(FAKE_CONFIG, status_interval_s=0.02))
        limits = {"batch": LaneLimits(max_share=0.75, kv_headroom=0.1)}
        self.scheduler = make(**({"lane_limits": limits, "clock": time.monotonic} | bounds))
        self.step_s = step_s
        self.begun: list[str] = []
        self.begun_before: dict[str, int] = {}
        """How many others had begun when a request came."""
        self.abort = self.scheduler.abort  # type: ignore[method-assign]
        self.pause, self.resume = self.scheduler.pause, self.scheduler.resume  # type: ignore[method-assign]
        self.expire, self.has_work = self.scheduler.expire, self.scheduler.has_work  # type: ignore[method-assign]
        self.check_integrity = self.scheduler.check_integrity  # type: ignore[method-assign]

    def add(self, request: EngineRequest) -> None:
        self.begun_before[request.request_id] = len(self.begun)
        self.scheduler.add(request)

    def step(self) -> list[EngineOutput]:
        time.sleep(self.step_s)
        output = self.scheduler.schedule()
        fresh = (s.seq.request_id for s in output.scheduled if s.seq.num_output_tokens == 0)
        self.begun += [name for name in fresh if name not in self.begun[-100:]]
        answers = self.scheduler.update(
            output, {s.key: [(1, None)] for s in output.scheduled if s.samples}
        )
        self.scheduler.check_integrity()
        return answers

    def status(self) -> ReplicaStatus:
        scheduler = self.scheduler
        return msgspec.structs.replace(
            super().status(),
            num_blocks=scheduler.cache.pool.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            lanes=scheduler.lanes(),
        )

    def assert_nothing_left(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished()
        assert scheduler.num_free_blocks == scheduler.cache.pool.num_blocks
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert not any(
            account.num_open or account.num_waiting
            for tenants in scheduler._share._tenants.values()
            for account in tenants.accounts.values()
        )


@pytest_asyncio.fixture
async def connect(serve: Serve) -> AsyncIterator[Any]:
    clients: list[EngineClient] = []

    async def connected(core: ScheduledCore) -> EngineClient:
        server = await serve(core)
        clients.append(await EngineClient.connect(server.address, timeout_s=30))
        return clients[-1]

    yield connected
    for client in clients:
        await client.close()


def batch(name: str, **changes: Any) -> EngineRequest:
    turn = {"lane": "batch", "tenant": f"t{hash(name) % 5}"}
    return request(name, 12, turn=turn, **({"max_tokens": 20} | changes))


async def test_a_flood_of_batch_does_not_move_who_is_interactive(connect: Any) -> None:
    core = ScheduledCore(step_s=0.001, num_blocks=200, max_num_seqs=8, max_waiting=1000)
    client = await connect(core)
    flood = [asyncio.create_task(collect(client, batch(f"b{i}"))) for i in range(300)]
    await until(lambda: client.status.lanes["batch"].num_running == 6)
    assert client.status.lanes["batch"].num_waiting > 200
    assert client.status.lanes["batch"].waiting_tokens > 2000
    for number in range(10):
        name = f"i{number}"
        await collect(client, request(name, 12, max_tokens=2))
        passed_by = core.begun[core.begun_before[name] : core.begun.index(name)]
        assert len(passed_by) <= 1, "of two hundred that were there before it"
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await until(lambda: client.status.num_running + client.status.num_waiting == 0)
    core.assert_nothing_left()


async def test_a_pause_holds_a_stream_and_its_end_lets_it_go_on(connect: Any) -> None:
    core = ScheduledCore(step_s=0.001)
    client = await connect(core)
    async with aclosing(client.generate(request("a", 5, max_tokens=40))) as outputs:
        said = len((await anext(outputs)).token_ids)
        for _ in range(3):
            await client.pause("a")
        await until(lambda: not core.has_work())
        assert core.scheduler.has_unfinished()
        other = await collect(client, request("b", 5, max_tokens=30))
        assert other[-1].finished, "others go on"
        await client.resume("a")
        said += sum([len(output.token_ids) async for output in outputs])
    assert said == 40
    await until(lambda: not core.scheduler.has_unfinished())
    core.assert_nothing_left()


async def test_an_abort_ends_what_is_paused_before_or_after_it_ran(connect: Any) -> None:
    core = ScheduledCore(step_s=0.001, max_num_seqs=1)
    client = await connect(core)
    outputs, queued = client.generate(request("a", 5, max_tokens=40)), None
    await anext(outputs)
    queued = asyncio.create_task(collect(client, request("b", 5)))
    await until(lambda: client.status.num_waiting == 1)
    for name in ("a", "b"):
        await client.pause(name)
    await until(lambda: not core.has_work())
    for name in ("a", "b"):
        await client.abort(name)
    last = [output async for output in outputs][-1]
    assert last.finish_reason == "abort" and last.usage.prefilled
    (only,) = await queued
    assert only.finish_reason == "abort" and not only.usage.prefilled
    core.assert_nothing_left()


async def test_pausing_what_is_not_there_changes_nothing(connect: Any) -> None:
    core = ScheduledCore()
    client = await connect(core)
    await client.pause("nobody")
    await client.resume("nobody")
    assert (await collect(client, request("a", 5)))[-1].finished
    await client.pause("a")
    core.assert_nothing_left()


async def test_what_is_not_begun_by_its_deadline_is_refused_by_name(connect: Any) -> None:
    core = ScheduledCore(step_s=0.004, max_num_seqs=1)
    client = await connect(core)
    runs = asyncio.create_task(
        collect(client, request("runs", 5, max_tokens=50, turn={"deadline_s": 0.1}))
    )
    await until(lambda: core.begun == ["runs"])
    with pytest.raises(DeadlineExceeded):
        await collect(client, request("late", 5, turn={"deadline_s": 0.02}))
    assert (await runs)[-1].usage.generated_tokens == 50, "once it runs it runs"
    core.assert_nothing_left()


async def test_a_deadline_passes_while_everything_is_paused(connect: Any) -> None:
    core = ScheduledCore(step_s=0.002, max_num_seqs=1)
    client = await connect(core)
    outputs = client.generate(request("runs", 5, max_tokens=1000))
    await anext(outputs)
    late = asyncio.create_task(collect(client, request("late", 5, turn={"deadline_s": 0.3})))
    await until(lambda: client.status.num_waiting == 1 or late.done())
    for name in ("late", "runs"):
        await client.pause(name)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late, 60)
    await outputs.aclose()
    await until(lambda: not core.scheduler.has_unfinished())
    core.assert_nothing_left()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("weight", 0.0),
        ("weight", 65.0),
        ("weight", float("nan")),
        ("tenant", "t" * 257),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("deadline_s", 1e6),
    ],
)
async def test_a_turn_that_means_nothing_is_refused_by_name(
    connect: Any, param: str, value: Any
) -> None:
    client = await connect(ScheduledCore())
    with pytest.raises(InvalidRequest) as caught:
        await collect(client, request("a", 5, turn={param: value}))
    assert caught.value.param == param


@pytest.mark.nightly
async def test_ten_thousand_random_aborts_and_pauses_leak_nothing(connect: Any) -> None:
    """Use few blocks: aborted while it waits, computes its prompt, says something, is preempted or
    paused. Each step checks all blocks and queues.
    """
    rng = random.Random(5)
    core = ScheduledCore(num_blocks=16, max_num_seqs=6, max_waiting=64, block_size=8)
    client = await connect(core)
    num_aborted = num_paused = 0

    async def one(name: str) -> None:
        nonlocal num_aborted, num_paused
        turn = {
            "lane": rng.choice(["interactive", "agentic", "batch"]),
            "tenant": rng.choice("abc"),
            "deadline_s": rng.choice([None, None, None, 0.05]),
        }
        asked = request(name, rng.randint(1, 30), n=rng.choice([1, 1, 3]), turn=turn, max_tokens=30)
        outputs = client.generate(asked)
        try:
            for _ in range(rng.randint(0, 4)):
                waiting = asyncio.ensure_future(anext(outputs))
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
                    num_paused += 1
                    await client.pause(name)
                    if rng.random() < 0.5:
                        await client.resume(name)
                await asyncio.wait_for(waiting, rng.choice([0.001, 0.02]))
        except (TimeoutError, StopAsyncIteration, DeadlineExceeded, EngineOverloaded):
            pass
        if rng.random() < 0.5:
            await client.abort(name)
        await outputs.aclose()
        num_aborted += 1

    for start in range(0, 10_000, 50):
        await asyncio.gather(*(one(f"r{start + i}") for i in range(50)))
    assert num_aborted == 10_000 and num_paused > 500
    await until(lambda: not core.scheduler.has_unfinished())
    assert core.scheduler.num_preemptions > 10, "the blocks were never short"
    core.assert_nothing_left()
