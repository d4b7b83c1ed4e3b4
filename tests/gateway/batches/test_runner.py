"""Lines and the bill: whatever happens to who runs them, each line is answered once and billed
once, or neither. Runners are killed in the middle of everything, on a real Postgres and spool."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from billing.tables import total_pico, usage_events
from foundation.request_context import LOG_CONTEXT
from gateway.batches import lines, steward
from gateway.batches.runner import BatchRunner
from gateway.batches.running import MAX_LOSSES
from gateway.batches.tables import batch_lines, batches
from gateway.fleet.errors import (
    ReplicaDied,
    ReplicaLost,
    ReplicaStepFailed,
    ReplicaUnavailable,
    ReplicaUnreadable,
)
from gateway.request_log.content_log import CONTENT, ContentLog, unpack
from gateway.request_log.tables import (
    TOKENS,
    request_content,
    request_log,
    requests_daily,
    requests_hourly,
)
from gateway.tenancy.tables import api_keys, projects
from gateway.wire.shared.batch import Batch, Shape
from tests.gateway.batches.world import LEASE_S, MODEL, SECRET, World
from tests.gateway.office import ScriptedReplica
from tests.gateway.whole_app import make_tenant

NUM_LINES, NUM_KILLS = 60, 25


def kill(runner: BatchRunner) -> None:
    """As SIGKILL does, as far as a process can to a part of itself: nothing is finished."""
    assert runner._looking._task is not None and runner._ending is not None
    for task in (runner._looking._task, runner._ending, *runner._running, *runner._attended):
        task.cancel()


async def test_lines_are_answered_in_order_and_billed_at_half_price(
    world: World, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: set[str] = set()
    stream = replica.stream

    def noted(*parts: Any, **options: Any) -> Any:
        context = LOG_CONTEXT.get()
        asked_for.add("" if context is None else context.request)
        return stream(*parts, **options)

    monkeypatch.setattr(replica, "stream", noted)
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
    assert asked_for == {it.request_id for it in events}, "what a line logs names its request"
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
    assert await check_ledger(world.db) == []
    await check_sums(world)
    assert world.dropped == []


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
        charged = total_pico(usage_events.c)
        ledger = sa.select(usage_events.c.request_id, usage_events.c.output, charged)
        ledger = ledger.where(usage_events.c.kind == "usage")
        rows = (await conn.execute(sa.select(request_log))).all()
        noted = {(f"req_{row.id.hex}", row.output_tokens, row.cost_pico) for row in rows}
        assert noted == {
            (id_, output, int(pico)) for id_, output, pico in await conn.execute(ledger)
        }
        assert {(row.batch, row.lane, row.status) for row in rows} <= {(batch.id, "batch", 200)}


async def check_sums(world: World) -> None:
    """The sums of the lane of batches are a recount of its rows."""
    names = (*TOKENS, "duration_us", "queue_us", "cost_pico")
    async with world.db.connect() as conn:
        rows = (await conn.execute(sa.select(request_log))).all()
        for table in (requests_hourly, requests_daily):
            columns = [sa.func.sum(table.c[name]) for name in ("num_requests", *names)]
            found = (await conn.execute(sa.select(*columns).where(table.c.lane == "batch"))).one()
            counted = [sum(getattr(row, name) or 0 for row in rows) for name in names]
            assert [int(each) for each in found] == [len(rows), *counted]


async def test_who_lost_its_lease_ends_no_line_and_bills_nobody(
    world: World, replica: ScriptedReplica
) -> None:
    """A gateway that was frozen for longer than its lease."""
    batch = await world.batch(1)
    frozen = world.runner(max_running=1, lease_s=60.0, poll_s=60.0)
    answered, gate = asyncio.Event(), asyncio.Event()
    ending = frozen._ender.end

    async def late(*args: Any) -> None:
        answered.set()
        await gate.wait()
        await ending(*args)

    frozen._ender.end = late  # type: ignore[method-assign]
    frozen.start()
    async with asyncio.timeout(30):
        await answered.wait()
    async with world.db.begin() as conn:
        for table in (batches, batch_lines):
            await conn.execute(sa.update(table).values(leased_until=sa.func.now()))
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
    wasted = (await world.services.spool.read_closed(10)).events
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
    wasted = (await world.services.spool.read_closed(10)).events
    assert [each.kind for each in wasted] == ["waste"] * MAX_LOSSES


@pytest.mark.parametrize("kind", [ReplicaDied, ReplicaStepFailed, ReplicaUnreadable])
@pytest.mark.parametrize("shape", ["openai", "anthropic"])
async def test_a_line_that_never_gets_a_whole_answer_fails_and_costs_nothing(
    world: World,
    replica: ScriptedReplica,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ReplicaUnavailable],
    shape: Shape,
) -> None:
    """Whether its upstream answers what cannot be read, or its engine dies of it each time."""
    monkeypatch.setattr("gateway.batches.running.UNAVAILABLE_S", 0.01)
    replica.refuses = kind("the answer was cut off")
    runner = world.runner()
    runner.start()
    done = await world.until(await world.batch(1, shape), "completed")
    await runner.close()
    assert (done.num_completed, done.num_failed) == (0, 1)
    file_id = done.error_file_id if shape == "openai" else done.output_file_id
    (error,) = await world.results(file_id, shape)
    said = json.dumps(error)
    assert kind.public_message in said and "cut off" not in said
    assert await world.billed() == []
    assert len(replica.attempts) == MAX_LOSSES
    assert (await world.services.spool.read_closed(10)).events == []
    async with world.db.connect() as conn:
        [row] = (await conn.execute(sa.select(request_log))).all()
    assert (row.cost_pico, row.output_tokens, row.project) == (0, 0, world.owner.project_id)
    assert row.status >= 500


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
    leased = await lines.lease(
        world.pools[1], world.cipher, "x", limit=10, under_way=(), lease_s=10
    )
    assert Counter(each.org_id for each in leased) == {mine.org_id: 5, other.org_id: 5}


async def test_the_texts_of_a_line_are_stored_where_its_project_wants_that(world: World) -> None:
    lost: list[int] = []
    log = ContentLog(world.pools[1], SECRET, keep_days=7, on_dropped=lost.append)
    stores = sa.update(projects).where(projects.c.id == world.owner.project_id)
    for on in (False, True):
        async with world.db.begin() as conn:
            await conn.execute(stores.values(store_content=on))
        runner = world.runner(content_log=log)
        runner.start()
        await world.until(await world.batch(2), "completed")
        await runner.close()
    await log.close()
    async with world.db.connect() as conn:
        rows = (await conn.execute(sa.select(request_content))).mappings().all()
    texts = [unpack(CONTENT.open(log.cipher, dict(row))["content"]) for row in rows]
    assert len(texts) == 2 and lost == []
    assert all(text.choices[0].text for text in texts)
