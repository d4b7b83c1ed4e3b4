"""A project takes with it what was stored there: once it is archived, or is to keep nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.batches.batches import forget_notes
from gateway.batches.tables import batches
from gateway.db import tenant
from gateway.files.tables import file_chunks, files
from gateway.responses.conversations import ConversationStore
from gateway.responses.kept import ResponseOwner, StoredResponse
from gateway.responses.sealing import PURPOSE
from gateway.responses.store import ResponseStore
from gateway.responses.tables import conversation_items, conversations, responses
from gateway.secret import Cipher
from tests.gateway.batches.conftest import replica, world
from tests.gateway.batches.world import SECRET, World

__all__ = ["replica", "world"]

STORED = (files, file_chunks, responses, conversations, conversation_items)


class Stores:
    """Everything in which a tenant may store something."""

    def __init__(self, world: World) -> None:
        self.world = world
        pools: dict[str, Any] = {"db": world.pools[0], "cipher": Cipher(SECRET, PURPOSE)}
        self.conversations = ConversationStore(**pools)
        self.responses = ResponseStore(
            **pools,
            system_db=world.pools[1],
            conversations=self.conversations,
            lifetime_s=3600.0,
        )

    async def fill(self) -> None:
        world, owner = self.world, ResponseOwner(**self.world.where)
        runner = world.runner()
        runner.start()
        await world.until(await world.batch(b"{\n"), "failed")
        await world.until(await world.batch(2), "completed")
        await runner.close()
        kept = StoredResponse(b"[]", b"{}")
        await self.responses.keep(owner, "resp_1", kept, status="completed", previous_id=None)
        async with tenant(world.db, owner.org_id) as conn:
            await self.conversations.create(conn, owner, {"of": "it"}, [])

    async def sweep(self) -> None:
        await self.world.files.flush()
        await self.responses.sweep()
        async with self.world.pools[1].begin() as conn:
            await forget_notes(conn)

    async def counts(self) -> list[int]:
        """The rows of each table, and the batches of which something is noted."""
        noted = sa.func.jsonb_typeof(batches.c.errors) != "null"
        async with self.world.db.connect() as conn:
            found = [
                await conn.scalar(sa.select(sa.func.count()).select_from(table)) for table in STORED
            ]
            found.append(await conn.scalar(sa.select(sa.func.count()).where(noted)))
        return [number or 0 for number in found]


@pytest.fixture
async def stores(world: World) -> AsyncIterator[Stores]:
    found = Stores(world)
    await found.fill()
    yield found


OF_PROJECT = "(SELECT org_id FROM projects WHERE id = :project_id)"


@pytest.mark.parametrize(
    ("ending", "whose"),
    [
        ("projects SET zero_retention = true", ":project_id"),
        ("projects SET archived_at = now()", ":project_id"),
        ("orgs SET archived_at = now()", OF_PROJECT),
    ],
)
async def test_nothing_stays_of_a_project_that_has_ended(
    stores: Stores, ending: str, whose: str
) -> None:
    await stores.sweep()
    before = await stores.counts()
    assert before == [3, 3, 1, 1, 0, 1], "of a live project all of it stays"
    other = f"UPDATE {ending} WHERE id <> {whose}"
    own = f"UPDATE {ending} WHERE id = {whose}"
    for statement, expected in ((other, before), (own, [0] * len(before))):
        async with stores.world.db.begin() as conn:
            await conn.execute(sa.text(statement), {"project_id": stores.world.owner.project_id})
        await stores.sweep()
        assert await stores.counts() == expected
