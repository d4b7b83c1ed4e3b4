"""A batch that is cancelled, or whose window ends, has what was done, in both shapes: each of its
lines is answered and billed, or told apart as one that was never run."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE
from gateway.batches.batches import cancel_batch, cancel_message_batch, delete_message_batch
from gateway.batches.tables import batch_lines, batches
from gateway.db import tenant
from gateway.tenancy.errors import InvalidField
from gateway.wire.anthropic.batches import MessageBatchCounts, to_message_batch
from gateway.wire.shared.batch import Batch, Shape
from tests.gateway.batches.test_runner import kill
from tests.gateway.batches.world import World
from tests.gateway.office import ScriptedReplica

SHAPES: tuple[Shape, ...] = ("openai", "anthropic")
UNRUN = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""Maps the code of a line that did not run to the type that Anthropic's results name."""
by_shape = pytest.mark.parametrize("shape", SHAPES)


async def check_results(world: World, done: Batch, shape: Shape, code: str, num_done: int) -> None:
    """So many of its lines were done; all others were not, for that reason."""
    events = await world.billed()
    assert (done.num_completed, len(events)) == (num_done, num_done)
    assert done.num_failed == done.num_unrun == done.num_total - num_done
    output = await world.results(done.output_file_id, shape)
    if shape == "openai":
        unrun = await world.results(done.error_file_id)
        assert {each["error"]["code"] for each in unrun} == {code}
        assert {each["response"] for each in unrun} == {None}
        answered = {each["response"]["request_id"] for each in output}
    else:
        assert done.error_file_id is None
        unrun = [each for each in output if each["result"]["type"] != "succeeded"]
        assert [each["result"] for each in unrun] == [{"type": UNRUN[code]}] * len(unrun)
        output = [each for each in output if each not in unrun]
        assert {each["result"]["message"]["output"] for each in output} == {
            each.output for each in events
        }
        answered = {each.request_id for each in events}
        check_counts(done, UNRUN[code])
    assert len(output) == num_done and answered == {each.request_id for each in events}
    lines = sorted(each["custom_id"] for each in (*output, *unrun))
    assert lines == sorted(f"line-{number}" for number in range(done.num_total))


def check_counts(done: Batch, unrun: str) -> None:
    """As a client sees them; and how long it sees the results."""
    kept_for, now = timedelta(days=30), datetime.now(tz=UTC)
    shown = to_message_batch(done, results_url="u", kept_for=kept_for, now=now)
    assert (shown.processing_status, shown.results_url, shown.archived_at) == ("ended", "u", None)
    assert shown.request_counts == MessageBatchCounts(
        succeeded=done.num_completed, **{unrun: done.num_unrun}
    )
    later = to_message_batch(done, results_url="u", kept_for=kept_for, now=now + kept_for)
    assert later.results_url is None and later.archived_at is not None


@by_shape
async def test_a_cancelled_batch_has_what_was_done(
    world: World, replica: ScriptedReplica, shape: Shape
) -> None:
    replica.hangs_after = 1
    runner = world.runner(max_running=2)
    runner.start()
    batch = await world.batch(5, shape)
    await asyncio.wait_for(replica.hangs.wait(), 30)
    cancel = cancel_batch if shape == "openai" else cancel_message_batch
    where = {**world.where, "batch_id": batch.id}
    async with tenant(world.db, world.owner.org_id) as conn:
        if shape == "anthropic":
            with pytest.raises(InvalidField, match="cancel it first"):
                await delete_message_batch(conn, **where, actor=COMMAND_LINE)
        for _ in range(2):
            found = await cancel(conn, **where, actor=COMMAND_LINE)
            assert found.status == "cancelling"
    await runner.look()
    assert (await world.now(batch)).status == "cancelling", "two lines run"
    replica.aborted.set()
    done = await world.until(batch, "cancelled")
    await runner.close()
    assert done.num_total == 5
    await check_results(world, done, shape, "batch_cancelled", 2)


async def test_what_a_dead_gateway_reserved_for_a_cancelled_batch_is_given_back(
    world: World, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are run by nobody any more, who would give it back."""
    replica.hangs_after = 1
    batch = await world.batch(3)
    dead = world.runner(max_running=2)
    dead.start()
    await asyncio.wait_for(replica.hangs.wait(), 30)
    kill(dead)
    begun = sa.select(batch_lines.c.request_id).where(batch_lines.c.leased_by.is_not(None))
    async with tenant(world.db, world.owner.org_id) as conn:
        lost = set(await conn.scalars(begun))
        await cancel_batch(conn, **world.where, batch_id=batch.id, actor=COMMAND_LINE)
    voided: list[tuple[str, str]] = []

    async def void(org_id: str, lease_id: str) -> None:
        voided.append((org_id, lease_id))

    monkeypatch.setattr(world.services.limiter, "void_lease", void)
    runner = world.runner()
    runner.start()
    await world.until(batch, "cancelled")
    await runner.close()
    assert lost and sorted(voided) == sorted((world.owner.org_id, each) for each in lost)


@by_shape
async def test_a_batch_that_is_late_has_what_was_done(
    world: World, replica: ScriptedReplica, shape: Shape
) -> None:
    batch = await world.batch(3, shape)
    runner = world.runner(max_running=1, poll_s=0.01)
    replica.hangs_after = 2
    runner.start()
    await asyncio.wait_for(replica.hangs.wait(), 30)
    async with world.db.begin() as conn:
        await conn.execute(sa.update(batches).values(expires_at=sa.func.now()))
    replica.aborted.set()
    done = await world.until(batch, "expired")
    await runner.close()
    assert done.num_total == 3
    await check_results(world, done, shape, "batch_expired", done.num_completed)
    assert done.num_completed >= 1
