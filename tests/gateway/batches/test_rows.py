"""Rows of batches: how many there are at once, and that those which were deleted go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE
from gateway.batches import batches as verbs
from gateway.batches.batches import create_batch, delete_message_batch
from gateway.batches.states import MESSAGES
from gateway.batches.tables import batches
from gateway.db import tenant
from gateway.tenancy.errors import InvalidField
from tests.gateway.batches.world import World

WAITS = sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")


async def test_of_two_at_once_only_as_many_begin_as_may(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second counts when the first is not committed yet."""
    monkeypatch.setattr(verbs, "MAX_LIVE_PER_ORG", 1)
    named: dict[str, Any] = {**world.where, "key_id": world.key_id, "actor": COMMAND_LINE}
    named |= {"endpoint": MESSAGES, "input_file_id": "file-x"}

    async def create() -> None:
        async with tenant(world.db, world.owner.org_id) as conn:
            await create_batch(conn, world.cipher, **named)

    async with tenant(world.db, world.owner.org_id) as first:
        await create_batch(first, world.cipher, **named)
        second = asyncio.create_task(create())
        async with world.db.connect() as conn:
            while not second.done() and not await conn.scalar(WAITS):
                await asyncio.sleep(0.01)
    with pytest.raises(InvalidField) as caught:
        await second
    assert caught.value.param == "requests"


async def test_one_that_was_deleted_is_forgotten_once_it_was_told_of(world: World) -> None:
    runner = world.runner()
    runner.start()
    deleted, kept = [await world.batch(1, "anthropic") for _ in range(2)]
    for batch in (deleted, kept):
        await world.until(batch, "completed")
    await runner.close()
    async with tenant(world.db, world.owner.org_id) as conn:
        await delete_message_batch(conn, **world.where, batch_id=deleted.id, actor=COMMAND_LINE)
    await world.runner().look()
    assert await ids(world) == {deleted.id, kept.id}
    async with world.db.begin() as conn:
        await conn.execute(sa.update(batches).values(dispatched_at=sa.func.now()))
    await world.runner().look()
    assert await ids(world) == {kept.id}


async def ids(world: World) -> set[str]:
    async with world.db.connect() as conn:
        return set(await conn.scalars(sa.select(batches.c.id)))
