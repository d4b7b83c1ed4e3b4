"""Stored responses are found by their project alone, continued in order, forgotten in time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.http_errors.table import UNREADABLE, to_http_error
from gateway.request_errors import BadField
from gateway.responses import store as responses_store
from gateway.responses.conversations import ConversationStore
from gateway.responses.kept import ResponseOwner, StoredResponse, to_json
from gateway.responses.store import ResponseStore
from gateway.responses.tables import responses as table
from gateway.secret import Cipher, Secret, SecretKey, UnknownSecret
from gateway.tenancy.errors import NotFound
from gateway.tenancy.tables import orgs, projects
from gateway.wire.openai_responses.items import Message, OutputText, Text

SECRET = Secret(version=1, keys=(SecretKey(id="1", secret="A" * 44),))
MINE, NEIGHBOUR, OTHER = (
    ResponseOwner("org_a", "proj_a"),
    ResponseOwner("org_a", "proj_b"),
    ResponseOwner("org_b", "proj_c"),
)
LIFETIME_S = 3600.0


def said(text: str) -> StoredResponse:
    given = Message(id=f"msg_{text}_in", status="completed", role="user", content=(Text(text),))
    answer = Message(
        id=f"msg_{text}", status="completed", role="assistant", content=(OutputText(text),)
    )
    return StoredResponse(given=to_json((given,)), answer=b'{"output":%b}' % to_json((answer,)))


@pytest.fixture
async def store(db: AsyncEngine, postgres_url: str) -> AsyncIterator[ResponseStore]:
    async with db.begin() as conn:
        for owner in (MINE, OTHER):
            await conn.execute(sa.insert(orgs).values(id=owner.org_id, name=owner.org_id))
        for owner in (MINE, NEIGHBOUR, OTHER):
            row = {"id": owner.project_id, "org_id": owner.org_id, "name": owner.project_id}
            await conn.execute(sa.insert(projects).values(row))
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    cipher = Cipher(SECRET, "t")
    yield ResponseStore(
        db=pools[0],
        system_db=pools[1],
        conversations=ConversationStore(db=pools[0], cipher=cipher),
        cipher=cipher,
        lifetime_s=LIFETIME_S,
    )
    for pool in pools:
        await pool.dispose()


async def keep(
    store: ResponseStore,
    name: str,
    previous: str | None = None,
    *,
    owner: ResponseOwner = MINE,
    status: str = "completed",
) -> None:
    await store.keep(owner, name, said(name), status=status, previous_id=previous)


async def expire(db: AsyncEngine, *names: str) -> None:
    async with db.begin() as conn:
        gone = sa.func.now() - sa.text("interval '1 second'")
        await conn.execute(sa.update(table).where(table.c.id.in_(names)).values(expires_at=gone))


async def names(db: AsyncEngine) -> set[str]:
    async with db.connect() as conn:
        return set((await conn.execute(sa.select(table.c.id))).scalars())


async def continued(store: ResponseStore, name: str, owner: ResponseOwner = MINE) -> list[str]:
    return [item.id for item in await store.context(owner, name)]


async def test_it_is_its_projects_alone(store: ResponseStore) -> None:
    await keep(store, "r1")
    assert await store.find(MINE, "r1") == said("r1")
    for owner in (NEIGHBOUR, OTHER):
        with pytest.raises(NotFound):
            await store.find(owner, "r1")
        with pytest.raises(NotFound):
            await store.delete(owner, "r1")
        with pytest.raises(BadField, match="not found"):
            await store.context(owner, "r1")
    await store.delete(MINE, "r1")
    with pytest.raises(NotFound):
        await store.find(MINE, "r1")


async def test_it_is_sealed_and_bound_to_its_place(store: ResponseStore, db: AsyncEngine) -> None:
    await keep(store, "secretword")
    await keep(store, "r2")
    async with db.begin() as conn:
        rows = {row.id: row for row in await conn.execute(sa.select(table))}
        assert b"secretword" not in rows["secretword"].content
        moved = sa.update(table).where(table.c.id == "r2")
        await conn.execute(moved.values(content=rows["secretword"].content))
    with pytest.raises(InvalidTag):
        await store.find(MINE, "r2")


async def test_what_a_removed_secret_sealed_says_so(
    store: ResponseStore, caplog: pytest.LogCaptureFixture
) -> None:
    await keep(store, "old")
    store._cipher = Cipher(Secret(version=1, keys=(SecretKey(id="2", secret="B" * 44),)), "t")
    for ask in (store.find, store.context):
        with pytest.raises(UnknownSecret) as caught:
            await ask(MINE, "old")
        http_error = to_http_error(caught.value)
        assert (http_error.status, http_error.body.code) == (410, "content_unreadable")
        assert http_error.body.message == UNREADABLE
    assert "secret 1," in caplog.text


async def test_what_is_continued_comes_in_order(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        await keep(store, name, previous)
    wanted = [each for name in ("a", "b", "c") for each in (f"msg_{name}_in", f"msg_{name}")]
    assert await continued(store, "c") == wanted
    assert await continued(store, "other") == [*wanted[:2], "msg_other_in", "msg_other"]


async def test_one_that_was_deleted_ends_what_continues_it(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await keep(store, name, previous)
    await store.delete(MINE, "a")
    with pytest.raises(BadField) as caught:
        await store.context(MINE, "c")
    said_of = "Previous response with id 'a' not found, which 'c' continues: it was deleted."
    assert (caught.value.message, caught.value.param) == (said_of, "previous_response_id")
    with pytest.raises(BadField, match="id 'a' not found.$"):
        await store.context(MINE, "a")
    assert (await store.find(MINE, "c")) == said("c")


@pytest.mark.parametrize("status", ["failed", "cancelled", "queued", "in_progress"])
async def test_what_was_not_answered_cannot_be_continued(store: ResponseStore, status: str) -> None:
    await keep(store, "a", status=status)
    with pytest.raises(BadField, match=status) as caught:
        await store.context(MINE, "a")
    assert caught.value.param == "previous_response_id"


async def test_a_chain_is_bounded(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    previous = None
    for name in "abcd":
        await keep(store, name, previous)
        previous = name
    monkeypatch.setattr(responses_store, "MAX_CONTINUED", 3)
    assert len(await continued(store, "c")) == 6
    with pytest.raises(BadField, match="More than 3 responses"):
        await store.context(MINE, "d")
    monkeypatch.setattr(responses_store, "MAX_CONTINUED", 4)
    monkeypatch.setattr(responses_store, "MAX_CONTINUED_BYTES", 100)
    with pytest.raises(BadField, match="More than 100 bytes"):
        await store.context(MINE, "d")


async def test_its_time_ends_and_the_sweep_leaves_what_is_continued(
    store: ResponseStore, db: AsyncEngine
) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("alone", None)):
        await keep(store, name, previous)
    await expire(db, "a", "b", "alone")
    with pytest.raises(NotFound):
        await store.find(MINE, "a")
    with pytest.raises(BadField, match="not found"):
        await store.context(MINE, "b")
    assert len(await continued(store, "c")) == 6, "what it continues stays with it"
    assert await store.sweep() == 1
    assert await names(db) == {"a", "b", "c"}
    await expire(db, "c")
    assert await store.sweep() == 3
    assert await names(db) == set()
