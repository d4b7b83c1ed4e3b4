"""Texts of requests come to Postgres sealed, are there for some days or until their project stores
none any more, and are another organization's to nobody."""

from __future__ import annotations

import time
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.sealed_rows import reseal
from gateway.audit.log import Actor
from gateway.columns import UNREADABLE
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.generate_request import ChatPrompt
from gateway.generation_events import RawBody, TextDelta
from gateway.request_log import content_log as module
from gateway.request_log.content import RequestContent
from gateway.request_log.content_log import CONTENT, PURPOSE, ContentLog, unpack
from gateway.request_log.content_reading import find_content
from gateway.secret import Cipher
from gateway.telemetry.captured_content import CapturedContent
from tests.gateway.a_secret import a_secret
from tests.gateway.request_log.making import ORG, OTHER, new_row
from tests.gateway.request_log.test_content import asks, captured, user

SECRET = a_secret("k1")
READER = Actor(kind="user", id="session_1", on_behalf_of="user_1")
TEXT = "a-very-secret-prompt " * 20
"""Longer than what zlib leaves as it is."""


class Texts:
    """A log of contents over a database with two organizations that store them."""

    def __init__(self, owner: AsyncEngine, postgres_url: str) -> None:
        self.owner = owner
        self.system_db = create_engine(postgres_url, role=ROLE_SYSTEM)
        self.app_db = create_engine(postgres_url, role=ROLE_TENANT)
        self.dropped: list[int] = []
        self.log = self.new_log()

    def new_log(self, **named: Any) -> ContentLog:
        named = {"keep_days": 7, "on_dropped": self.dropped.append, **named}
        return ContentLog(named.pop("db", self.system_db), SECRET, **named)

    async def run(self, statement: str) -> int:
        async with self.owner.begin() as conn:
            done = await conn.execute(sa.text(statement))
            return int(done.scalar_one()) if done.returns_rows else 0

    async def count(self) -> int:
        return await self.run("SELECT count(*) FROM request_content")

    async def find(self, org: str, request_id: str) -> RequestContent | None:
        async with tenant(self.app_db, org) as conn:
            return await find_content(conn, Cipher(SECRET, PURPOSE), org, request_id, reader=READER)


@pytest.fixture
async def texts(db: AsyncEngine, postgres_url: str) -> AsyncIterator[Texts]:
    found = Texts(db, postgres_url)
    for org, project in ((ORG, "proj_1"), (OTHER, "proj_2")):
        await found.run(f"INSERT INTO orgs (id, name) VALUES ('{org}', '{org}')")
        await found.run(
            "INSERT INTO projects (id, org_id, name, store_content)"
            f" VALUES ('{project}', '{org}', 'web', true)"
        )
    yield found
    await found.system_db.dispose()
    await found.app_db.dispose()


def said(text: str = TEXT) -> CapturedContent:
    prompt = ChatPrompt(messages=[{"role": "user", "content": text}])
    return captured(asks(prompt=prompt), (TextDelta(index=0, text="<i>yes</i>"),))


async def test_texts_are_found_by_their_organization_alone_and_stand_sealed(texts: Texts) -> None:
    mine, theirs = new_row(), new_row(org=OTHER, project="proj_2")
    texts.log.put(mine, said())
    texts.log.put(theirs, said("theirs"))
    await texts.log.close()
    found = await texts.find(ORG, mine.id)
    assert found is not None and found.messages == (user(TEXT),)
    assert found.choices[0].text == "<i>yes</i>"
    assert await texts.find(ORG, f"req_{mine.id}") == found
    assert await texts.find(ORG, theirs.id) is await texts.find(OTHER, mine.id) is None
    assert await texts.find(ORG, "req_nothing") is None
    async with tenant(texts.app_db, ORG) as conn:
        [row] = (await conn.execute(sa.text("SELECT * FROM request_content"))).mappings()
    assert b"secret" not in row["content"] and len(row["content"]) < len(TEXT)
    moved = {**row, "project": "proj_2"}
    with pytest.raises(UNREADABLE):
        CONTENT.open(Cipher(SECRET, PURPOSE), moved)


async def test_a_batch_that_comes_again_changes_nothing(texts: Texts) -> None:
    row = new_row()
    texts.log.put(row, said())
    again = [*texts.log._waiting]
    await texts.log.flush()
    texts.log._waiting.extend(again)
    await texts.log.flush()
    assert await texts.count() == 1 and texts.dropped == []


async def test_days_are_dropped_in_time(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2027, 3, 5, 12, tzinfo=UTC)
    clock = [now.timestamp()]
    log = texts.new_log(keep_days=2, wall_clock=lambda: clock[0])
    for back in range(4):
        log.put(new_row(at=(now - timedelta(days=back)).timestamp()), said())
    await log.flush()
    assert await texts.count() == 4
    clock[0] += 600
    await log.flush()
    assert await texts.count() == 3
    names = (
        "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_inherits"
        " JOIN pg_class ON oid = inhrelid WHERE inhparent = 'request_content'::regclass"
    )
    async with texts.owner.connect() as conn:
        days = str(await conn.scalar(sa.text(names))).split()
    assert days == [f"request_content_2027030{day}" for day in (3, 4, 5, 6)], "tomorrow's is there"
    none = texts.new_log(keep_days=0, wall_clock=lambda: clock[0])
    none.put(new_row(at=clock[0]), said())
    clock[0] += 600
    await none.flush()
    assert await texts.count() == 0 and none.keeps_any is False


@pytest.mark.parametrize(
    "ending",
    [
        "UPDATE projects SET store_content = false WHERE id = 'proj_1'",
        "UPDATE projects SET zero_retention = true WHERE id = 'proj_1'",
        "UPDATE projects SET archived_at = now() WHERE id = 'proj_1'",
        f"UPDATE orgs SET archived_at = now() WHERE id = '{ORG}'",
    ],
)
async def test_what_a_project_stores_no_more_is_gone(
    texts: Texts, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DELETED", 2)
    clock = [time.time()]
    log = texts.new_log(wall_clock=lambda: clock[0])
    rows = [new_row() for _ in range(5)]
    other = new_row(org=OTHER, project="proj_2")
    for row in (*rows, other):
        log.put(row, said())
    await log.flush()
    await texts.run(ending)
    assert await texts.find(ORG, rows[0].id) is None, "at once"
    assert await texts.count() == 6
    clock[0] += 600
    await log.flush()
    assert await texts.count() == 1
    assert await texts.find(OTHER, other.id) is not None


async def test_a_postgres_that_is_away_costs_texts_alone(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    log = texts.new_log(db=nowhere)
    log.put(new_row(), said())
    size = len(log._waiting[0][1])
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 3 * size + size // 2)
    for _ in range(5):
        log.put(new_row(), said())
    await log.flush()
    assert len(log._waiting) == 3 and sum(texts.dropped) == 3
    log._db = texts.system_db
    await log.flush()
    assert await texts.count() == 3
    for _ in range(3):
        log.put(new_row(), said())
    await log.close()
    assert await texts.count() == 6 and sum(texts.dropped) == 3
    await nowhere.dispose()


async def test_what_cannot_be_read_is_counted_and_not_logged(
    texts: Texts, caplog: pytest.LogCaptureFixture
) -> None:
    broken = captured(asks(forward={"messages": []}), (RawBody(b'{"secret'),))
    texts.log.put(new_row(), broken)
    await texts.log.flush()
    assert sum(texts.dropped) == 1 and await texts.count() == 0
    assert "secret" not in caplog.text and "is not stored" in caplog.text


async def test_texts_are_sealed_anew_under_another_secret(texts: Texts) -> None:
    row = new_row()
    texts.log.put(row, said())
    await texts.log.close()
    rotated = a_secret("k2", "k1")
    async with texts.owner.begin() as holding:
        await holding.execute(sa.text("SELECT FROM request_content FOR UPDATE"))
        held = await reseal(texts.system_db, rotated)
    assert (held.num_sealed, held.num_held) == (0, {"request_content": 1}) and not held.is_whole
    done = await reseal(texts.system_db, rotated)
    assert (done.num_sealed, done.is_whole) == (1, True)
    async with tenant(texts.app_db, ORG) as conn:
        found = await find_content(conn, Cipher(rotated, PURPOSE), ORG, row.id, reader=READER)
    assert found is not None and found.messages == (user(TEXT),)


def test_what_is_far_too_large_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="longer"):
        monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1000)
        unpack(zlib.compress(b" " * 10_000))
