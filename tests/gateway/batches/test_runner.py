"""Lines and the bill: whatever happens to who runs them, each line is answered once and billed
once, or neither. Runners are killed in the middle of everything, on a real Postgres and spool."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import ledger
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.tables import usage_events
from billing.worker import nobody
from gateway.audit.log import COMMAND_LINE
from gateway.batches import lines, steward
from gateway.batches.batches import Batch, cancel_batch, create_batch, get_batch
from gateway.batches.endpoints import Endpoint, ask_surface
from gateway.batches.runner import BatchRunner
from gateway.batches.running import MAX_LOSSES
from gateway.batches.tables import batch_lines, batches
from gateway.batches.validation import InputBounds
from gateway.calls import Surface
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.files.contents import PostgresContents
from gateway.files.files import get_file
from gateway.files.store import FileStore
from gateway.fleet.errors import ReplicaLost, ReplicaUnavailable
from gateway.fleet.replica import MeteredUsage, TextDelta
from gateway.fleet.router import Fleet, Route
from gateway.inference import Desk
from gateway.limits.limiter import Limiter
from gateway.tasks import TaskSet
from gateway.telemetry import Telemetry
from gateway.tenancy.tables import api_keys
from gateway.wire.request import ChatPrompt, GenerateRequest
from tests.gateway.office import AsListed, ScriptedReplica
from tests.gateway.whole_app import Tenant, make_tenant

MODEL, CHAT = "penny", "/v1/chat/completions"
BOUNDS = InputBounds(max_lines=1000, max_file_bytes=2**20, max_line_bytes=2**16)
LEASE_S = 0.4
NUM_LINES, NUM_KILLS = 60, 25


class WholeEncoder:
    def __init__(self, request: GenerateRequest, heading: object) -> None:
        self.text = ""

    def encode(self, items: Sequence[Any]) -> bytes:
        self.text += "".join(each.text for each in items if isinstance(each, TextDelta))
        return b""

    def finish(self, usage: MeteredUsage, cost: object = None) -> bytes:
        return msgspec.json.encode({"text": self.text, "output": usage.output})


def read(body: bytes, kind: object) -> GenerateRequest:
    prompt = ChatPrompt(messages=[])
    return GenerateRequest(model=MODEL, stream=False, include_usage=False, prompt=prompt)


SURFACE = Surface(id_prefix="chatcmpl-", read=read, encoder=WholeEncoder)


class World:
    """A tenant with batches, and runners for them."""

    def __init__(self, db: AsyncEngine, owner: Tenant, key_id: str, **parts: Any) -> None:
        self.db, self.owner, self.key_id = db, owner, key_id
        self.desk: Desk = parts["desk"]
        self.pools: list[AsyncEngine] = parts["pools"]
        self.files: FileStore = parts["files"]

    @property
    def where(self) -> dict[str, str]:
        return {"org_id": self.owner.org_id, "project_id": self.owner.project_id}

    def runner(self, **options: Any) -> BatchRunner:
        given: dict[str, Any] = {"max_running": 8, "lease_s": LEASE_S, "poll_s": 0.02, **options}
        return BatchRunner(
            desk=self.desk,
            telemetry=Telemetry(models=[MODEL]),
            db=self.pools[0],
            system_db=self.pools[1],
            files=self.files,
            bounds=BOUNDS,
            endpoints={CHAT: Endpoint(to_call=partial(ask_surface, self.desk, SURFACE))},
            on_booked=nobody,
            **given,
        )

    async def batch(self, content: bytes | int) -> Batch:
        if isinstance(content, int):
            content = b"".join(a_line(number) for number in range(content))
        upload = await self.files.begin(**self.where, most_bytes=len(content))
        await upload.write(content)
        await upload.close()
        async with tenant(self.db, self.owner.org_id) as conn:
            file = await upload.finish(conn, purpose="batch", filename="in.jsonl")
            return await create_batch(
                conn,
                **self.where,
                key_id=self.key_id,
                endpoint=CHAT,
                input_file_id=file.id,
                actor=COMMAND_LINE,
            )

    async def now(self, batch: Batch) -> Batch:
        async with tenant(self.db, self.owner.org_id) as conn:
            return await get_batch(conn, **self.where, batch_id=batch.id)

    async def until(self, batch: Batch, *statuses: str) -> Batch:
        async with asyncio.timeout(20):
            while (found := await self.now(batch)).status not in statuses:
                await asyncio.sleep(0.02)
        return found

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        async with tenant(self.db, self.owner.org_id) as conn:
            file = await get_file(conn, **self.where, file_id=file_id)
        content = b"".join([piece async for piece in self.files.read(file)])
        assert len(content) == file.size_bytes
        return [json.loads(line) for line in content.splitlines()]

    async def billed(self) -> list[Any]:
        async with self.db.connect() as conn:
            found = sa.select(usage_events).where(usage_events.c.kind == "usage")
            return list(await conn.execute(found))


def a_line(number: int, **changes: Any) -> bytes:
    line = {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": []},
        **changes,
    }
    return json.dumps(line).encode() + b"\n"


@pytest.fixture
async def replica() -> ScriptedReplica:
    return ScriptedReplica()


@pytest.fixture
async def world(
    db: AsyncEngine,
    postgres_url: str,
    redis: Redis,
    tmp_path: Path,
    replica: ScriptedReplica,
) -> AsyncIterator[World]:
    owner = await make_tenant(postgres_url, "acme", is_operator=True)
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    spool, tasks, limiter = await Spool.open(tmp_path / "spool"), TaskSet(), Limiter(redis)
    route = Route(model=MODEL, kind="engine", replicas=(replica,))
    desk = Desk(
        fleet=Fleet([route], rng=AsListed()),
        limiter=limiter,
        spool=spool,
        price_book=PriceBook.load(),
        tasks=tasks,
        cache_salts=lambda org: org,
        stalled_reader_s=60.0,
    )
    files = FileStore(
        db=pools[0],
        system_db=pools[1],
        contents=PostgresContents(pools[0]),
        max_file_bytes=2**20,
        max_org_bytes=2**24,
    )
    async with db.connect() as conn:
        mine = sa.select(api_keys.c.id).where(api_keys.c.name == "first")
        key_id = str(await conn.scalar(mine))
    yield World(db, owner, key_id, desk=desk, pools=pools, files=files)
    await tasks.close()
    await limiter.close()
    await spool.shutdown()
    for pool in pools:
        await pool.dispose()


def kill(runner: BatchRunner) -> None:
    """As SIGKILL does, as far as a process can to a part of itself: nothing is finished."""
    for task in (*runner._tasks, *runner._running, *runner._attended):
        task.cancel()


async def test_lines_are_answered_in_order_and_billed_at_half_price(world: World) -> None:
    runner = world.runner()
    runner.start()
    batch = await world.batch(7)
    done = await world.until(batch, "completed")
    await runner.close()
    assert (done.num_total, done.num_completed, done.num_failed) == (7, 7, 0)
    assert done.model == MODEL and done.error_file_id is None
    output = await world.results(done.output_file_id)
    assert [each["custom_id"] for each in output] == [f"line-{n}" for n in range(7)]
    assert {each["response"]["status_code"] for each in output} == {200}
    assert output[0]["response"]["body"] == {"text": "w1 w2 w3 ", "output": 3}
    events = await world.billed()
    assert {each["response"]["request_id"] for each in output} == {it.request_id for it in events}
    assert {(it.tier, it.lane, it.finish) for it in events} == {("batch", "batch", "done")}
    book = PriceBook.load()
    now = batch.created_at.timestamp()
    half, full = book.at(MODEL, now, "batch"), book.at(MODEL, now)
    assert {name: 2 * price.pico_per_token for name, price in half.items()} == {
        name: price.pico_per_token for name, price in full.items()
    }
    assert {it.output_pico for it in events} == {3 * half["output"].pico_per_token}
    assert (done.input_tokens, done.cached_tokens, done.output_tokens) == (70, 28, 21)


async def test_kills_at_random_lose_and_double_nothing(
    world: World, replica: ScriptedReplica
) -> None:
    """After each kill, too, what is answered is what is billed."""
    rng = random.Random(7)
    batch = await world.batch(NUM_LINES)
    stream = replica.stream

    async def slow(*args: Any, **named: Any) -> Any:
        await asyncio.sleep(rng.uniform(0, 0.05))
        if rng.random() < 0.05:
            raise ReplicaUnavailable("not now")
        async for event in stream(*args, **named):
            yield event

    replica.stream = slow  # type: ignore[method-assign]
    for _ in range(NUM_KILLS):
        runner = world.runner(max_running=4)
        runner.start()
        await asyncio.sleep(rng.uniform(0.0, 0.12))
        kill(runner)
        await asyncio.sleep(0)
        await check_agreement(world, batch)
        if (await world.now(batch)).status == "completed":
            break
        await asyncio.sleep(rng.choice([0.0, LEASE_S]))
    runner = world.runner()
    runner.start()
    done = await world.until(batch, "completed")
    await runner.close()
    output, errors = [await world.results(each) for each in (done.output_file_id, None)]
    assert errors == [] and done.error_file_id is None
    assert [each["custom_id"] for each in output] == [f"line-{n}" for n in range(NUM_LINES)]
    events = await world.billed()
    answered = Counter(each["response"]["request_id"] for each in output)
    assert answered == Counter(it.request_id for it in events)
    assert (done.num_completed, done.num_failed) == (NUM_LINES, 0)
    assert done.output_tokens == sum(it.output for it in events)
    assert len(replica.attempts) >= NUM_LINES
    assert await ledger.check(world.db) == []


async def check_agreement(world: World, batch: Batch) -> None:
    """In one snapshot."""
    async with world.db.connect() as conn:
        await conn.execution_options(isolation_level="REPEATABLE READ")
        found = await conn.scalar(sa.select(batches.c.status).where(batches.c.id == batch.id))
        done = sa.select(batch_lines.c.event_id).where(batch_lines.c.state == "done")
        answered = set(await conn.scalars(done))
        booked = set(
            await conn.scalars(sa.select(usage_events.c.id).where(usage_events.c.kind == "usage"))
        )
        if found != "completed":  # then its lines are in a file
            assert answered == booked


async def test_who_lost_its_lease_ends_no_line_and_bills_nobody(
    world: World, replica: ScriptedReplica
) -> None:
    """A gateway that was frozen for longer than its lease."""
    batch = await world.batch(1)
    frozen = world.runner(lease_s=0.05, poll_s=60.0)
    gate = asyncio.Event()
    ending = frozen._ender.end

    async def late(*args: Any) -> None:
        await gate.wait()
        await ending(*args)

    frozen._ender.end = late  # type: ignore[method-assign]
    frozen.start()
    await world.until(batch, "in_progress")
    await frozen.look()
    await asyncio.sleep(0.2)
    other = world.runner()
    other.start()
    done = await world.until(batch, "completed")
    gate.set()
    await frozen.close()
    await other.close()
    (event,) = await world.billed()
    (output,) = await world.results(done.output_file_id)
    assert output["response"]["request_id"] == event.request_id
    assert len(replica.attempts) == 2
    wasted = (await world.desk.spool.read_closed(10)).events
    assert {each.kind for each in wasted} == {"waste"}
    assert {each.id for each in wasted} == set(replica.attempts) - {event.id}


async def test_what_is_lost_is_tried_again_and_then_fails_alone(
    world: World, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.running.UNAVAILABLE_S", 0.01)
    replica.fails_after = (1, ReplicaLost("gone"))
    runner = world.runner()
    runner.start()
    done = await world.until(await world.batch(1), "completed")
    await runner.close()
    assert (done.num_completed, done.num_failed, done.output_file_id) == (0, 1, None)
    (error,) = await world.results(done.error_file_id)
    assert error["response"]["status_code"] == 500 and error["error"] is None
    assert error["response"]["body"]["error"]["type"] == "server_error"
    assert await world.billed() == []
    assert len(replica.attempts) == MAX_LOSSES
    wasted = (await world.desk.spool.read_closed(10)).events
    assert [each.kind for each in wasted] == ["waste"] * MAX_LOSSES


async def test_a_cancelled_batch_has_what_was_done(world: World, replica: ScriptedReplica) -> None:
    replica.hangs_after = 1
    runner = world.runner(max_running=2)
    runner.start()
    batch = await world.batch(5)
    await asyncio.wait_for(replica.hangs.wait(), 10)
    async with tenant(world.db, world.owner.org_id) as conn:
        where = {**world.where, "batch_id": batch.id, "actor": COMMAND_LINE}
        assert (await cancel_batch(conn, **where)).status == "cancelling"
        assert (await cancel_batch(conn, **where)).status == "cancelling"
    await asyncio.sleep(0.1)
    assert (await world.now(batch)).status == "cancelling", "two lines run"
    replica.aborted.set()
    done = await world.until(batch, "cancelled")
    await runner.close()
    assert (done.num_total, done.num_completed, done.num_failed) == (5, 2, 3)
    output = await world.results(done.output_file_id)
    errors = await world.results(done.error_file_id)
    assert len(output) == len(await world.billed()) == 2
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert {each["response"] for each in errors} == {None}


async def test_a_batch_that_is_late_has_what_was_done(
    world: World, replica: ScriptedReplica
) -> None:
    batch = await world.batch(3)
    first = world.runner(max_running=1, poll_s=0.01)
    replica.hangs_after = 2
    first.start()
    await asyncio.wait_for(replica.hangs.wait(), 10)
    async with world.db.begin() as conn:
        await conn.execute(sa.update(batches).values(expires_at=sa.func.now()))
    replica.aborted.set()
    done = await world.until(batch, "expired")
    await first.close()
    assert done.num_completed + done.num_failed == 3 and done.num_completed >= 1
    errors = await world.results(done.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len(await world.results(done.output_file_id)) == len(await world.billed())


async def test_a_key_that_was_revoked_asks_nothing_more(
    world: World, replica: ScriptedReplica
) -> None:
    batch = await world.batch(2)
    async with world.db.begin() as conn:
        await conn.execute(sa.update(api_keys).values(revoked_at=sa.func.now()))
    runner = world.runner()
    runner.start()
    done = await world.until(batch, "completed")
    await runner.close()
    errors = await world.results(done.error_file_id)
    assert [each["response"]["status_code"] for each in errors] == [401, 401]
    assert replica.attempts == [] and await world.billed() == []


async def test_lines_of_all_orgs_come_in_turns(world: World, postgres_url: str) -> None:
    other = await make_tenant(postgres_url, "other", is_operator=False)
    await world.batch(20)
    mine, world.owner = world.owner, other
    async with world.db.connect() as conn:
        first = sa.select(api_keys.c.id)
        first = first.where(api_keys.c.name == "first", api_keys.c.org_id == other.org_id)
        world.key_id = str(await conn.scalar(first))
    await world.batch(20)
    runner = world.runner()
    for _ in range(2):
        batch = await steward.take(world.pools[1], runner._holder, lease_s=10)
        assert batch is not None
        await runner._attend(batch)
    leased = await lines.lease(world.pools[1], "x", limit=10, under_way=(), lease_s=10)
    assert Counter(each.org_id for each in leased) == {mine.org_id: 5, other.org_id: 5}
