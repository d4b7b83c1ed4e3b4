"""The real scheduler behind the real socket, and gateways that vanish, abort, pause and forget at
random, and ask for some back: every token is on somebody's bill once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from itertools import count

import msgspec

from engine.errors import DeadlineExceeded, EngineOverloaded, EngineUnavailable, TakenBack
from engine.fairness import LANE_WEIGHTS
from engine.fake.engine import FAKE_CONFIG, FakeCore
from engine.protocol import EngineOutput, EngineRequest, OrphanedUsage, ReplicaStatus, Usage
from engine.transport.client import EngineClient
from tests.engine.peers import Serve, until
from tests.engine.scheduling.scheduling import Clock, make, request

NUM_REQUESTS = 1000
NUM_GATEWAYS = 4
AT_ONCE = 6


class SchedulerCore(FakeCore):
    """As the engine's own, with a model that says the same to everybody. Its books are checked
    whenever something was asked of it."""

    def __init__(self) -> None:
        super().__init__(msgspec.structs.replace(FAKE_CONFIG, status_interval_s=0.02))
        self.clock = Clock()
        self.scheduler = make(24, max_num_seqs=5, max_waiting=20, clock=self.clock)
        self.generated_tokens = 0

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[EngineOutput]:
        outputs = self.scheduler.abort(request_id)
        assert request_id not in self.scheduler._requests
        self.scheduler.check_integrity()
        return outputs

    def take_back(self, request_id: str) -> bool:
        is_back = self.scheduler.take_back(request_id)
        self.scheduler.check_integrity()
        return is_back

    def pause(self, request_id: str) -> None:
        self.scheduler.pause(request_id)
        self.scheduler.check_integrity()

    def resume(self, request_id: str) -> None:
        self.scheduler.resume(request_id)
        self.scheduler.check_integrity()

    def expire(self) -> list[str]:
        self.clock.now += 1.0
        return self.scheduler.expire()

    def step(self) -> list[EngineOutput]:
        step = self.scheduler.schedule()
        sampled = {entry.key: [(1, None)] for entry in step.scheduled if entry.samples}
        outputs = self.scheduler.update(step, sampled)
        self.generated_tokens += sum(len(output.token_ids) for output in outputs)
        self.scheduler.check_integrity()
        return outputs

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def status(self) -> ReplicaStatus:
        return msgspec.structs.replace(
            super().status(),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            generated_tokens=self.generated_tokens,
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()


class Bills:
    """By request id, what somebody has on disk."""

    def __init__(self) -> None:
        self.usages: dict[str, Usage] = {}
        self.num_orphans = self.num_lost = self.num_refused = self.num_taken_back = 0

    async def orphaned(self, orphan: OrphanedUsage) -> None:
        self.num_orphans += 1
        self.book(orphan.request_id, orphan.usage)

    def book(self, request_id: str, usage: Usage) -> None:
        before = self.usages.setdefault(request_id, usage)
        assert before == usage, "the same id with another usage"


async def one(client: EngineClient, asked: EngineRequest, bills: Bills, rng: random.Random) -> None:
    """A request that is read to its end, aborted, paused for a while, or left unread."""
    last: EngineOutput | None = None
    leaves_after = rng.choice([1, 3, 10, 99, 99])
    if rng.random() < 0.2:
        asyncio.get_running_loop().call_soon(client.take_back, asked.request_id)
    try:
        async with aclosing(client.generate(asked)) as outputs:
            async for output in outputs:
                last = output
                leaves_after -= 1
                if leaves_after == 0:
                    if rng.random() < 0.5:
                        return  # what it used will be an orphan's
                    await client.abort(asked.request_id)
                elif rng.random() < 0.1:
                    await client.pause(asked.request_id)
                    await asyncio.sleep(rng.random() * 0.01)
                    if rng.random() < 0.8:
                        await client.resume(asked.request_id)
                    else:
                        await client.abort(asked.request_id)
    except EngineUnavailable:
        bills.num_lost += 1
    except (EngineOverloaded, DeadlineExceeded):
        bills.num_refused += 1
    except TakenBack:
        assert last is None, "it had begun"
        bills.num_taken_back += 1
    else:
        assert last is not None and last.finished
        if last.usage.prefilled:
            bills.book(asked.request_id, last.usage)
            await client.acknowledge(asked.request_id)


async def test_whoever_vanishes_leaves_nothing_but_a_bill(serve: Serve) -> None:
    core, bills, numbers, rng = SchedulerCore(), Bills(), count(), random.Random(3)
    server = await serve(core)

    def asked(number: int) -> EngineRequest:
        turn = {
            "lane": rng.choice(sorted(LANE_WEIGHTS)),
            "tenant": rng.choice("ab"),
            "deadline_s": rng.choice([None, None, 3]),
        }
        prompt = [10, 11, 12, 13, 14] * rng.randint(1, 5)
        n = rng.choice([1, 1, 2])
        return request(f"r{number}", prompt, n=n, max_tokens=rng.randint(1, 30), turn=turn)

    async def gateway() -> None:
        number = 0
        while number < NUM_REQUESTS:
            client = await EngineClient.connect(
                server.address, timeout_s=30, on_orphan=bills.orphaned
            )
            lives = rng.randint(1, 10)
            for turn in range(lives):
                batch = [one(client, asked(number := next(numbers)), bills, rng)]
                batch += [one(client, asked(next(numbers)), bills, rng) for _ in range(AT_ONCE - 1)]
                running = asyncio.gather(*batch)
                if turn == lives - 1:
                    await asyncio.sleep(rng.random() * 0.02)
                    await client.close()  # in the midst of it
                await running
            await client.close()

    await asyncio.gather(*(gateway() for _ in range(NUM_GATEWAYS)))
    await until(lambda: not server._live)
    heir = await EngineClient.connect(server.address, timeout_s=30, on_orphan=bills.orphaned)
    await until(lambda: not server._orphans)
    assert all(not connection.unacked for connection in server._connections)
    await heir.close()
    await until(lambda: not server._connections)
    assert min(bills.num_lost, bills.num_orphans, bills.num_refused, bills.num_taken_back) > 20, (
        vars(bills)
    )
    assert not core.scheduler.has_unfinished()
    assert core.scheduler.num_free_blocks == core.scheduler.cache.pool.num_blocks
    assert sum(usage.generated_tokens for usage in bills.usages.values()) == core.generated_tokens
