"""A process is woken when work can be seen, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.worker import work_listener
from gateway.worker.work_listener import CHANNEL, LONG_S, WorkListener

WORK = importlib.import_module("migrations.versions.0074_work")
VERSIONS = importlib.import_module("migrations.versions.0077_model_versions")
PATIENCE_S = 30.0


class Woken:
    """Counts how often it was woken."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._changed.set()

    async def beyond(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count <= count:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def own_pool(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=1)
    yield engine
    await engine.dispose()


Listen = Callable[..., Awaitable[tuple[WorkListener, Woken]]]


@pytest.fixture
async def listen(own_pool: AsyncEngine) -> AsyncIterator[Listen]:
    made: list[WorkListener] = []

    async def open_one(due: str | None = None, **options: Any) -> tuple[WorkListener, Woken]:
        listener, woken = WorkListener(own_pool, **options), Woken()
        listener.watch("tests", woken, due)
        made.append(listener)
        listener.start()
        await woken.beyond(0)
        assert listener.is_hearing
        return listener, woken

    yield open_one
    for each in made:
        await each.close()


SAY = sa.text(f"SELECT pg_notify('{CHANNEL}', :topic)")


async def say(db: AsyncEngine, topic: str = "tests") -> None:
    async with db.begin() as conn:
        await conn.execute(SAY, {"topic": topic})


async def kill_others(db: AsyncEngine) -> None:
    """End every connection to this test's database but the one that says so."""
    async with db.connect() as conn:
        await conn.execute(
            sa.text("""
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
            """)
        )


async def test_a_notification_wakes_at_commit_and_only_its_topic(
    db: AsyncEngine, listen: Listen
) -> None:
    listener, woken = await listen()
    other = Woken()
    listener.watch("others", other)
    async with db.begin() as conn:
        await conn.execute(SAY, {"topic": "tests"})
        before = woken.count
        await asyncio.sleep(0.05)
        assert woken.count == before, "the work is not yet to be seen"
    await woken.beyond(before)
    await say(db, "others")
    await other.beyond(0)
    assert woken.count == before + 1


async def test_who_listens_rests_and_who_cannot_polls(
    listen: Listen, own_pool: AsyncEngine
) -> None:
    listener, _ = await listen()
    assert listener.rest_s(0.5) == LONG_S
    assert WorkListener(own_pool).rest_s(0.5) == 0.5


async def test_a_killed_connection_wakes_all_and_is_replaced(
    db: AsyncEngine, listen: Listen
) -> None:
    listener, woken = await listen()
    before = woken.count
    await kill_others(db)
    await woken.beyond(before + 1)  # as it was lost, and as it was back
    assert listener.is_hearing
    before = woken.count
    await say(db)
    await woken.beyond(before)


async def test_a_lost_notification_is_made_up_for_by_a_look(
    db: AsyncEngine, listen: Listen
) -> None:
    """Plans have no trigger, so a row of theirs stands for work that nobody hears of."""
    due = "SELECT now() WHERE EXISTS (SELECT FROM plans WHERE name = 'waits')"
    _, woken = await listen(due, look_s=0.05, apart_s=0.01)
    before = woken.count
    async with db.begin() as conn:
        await conn.execute(sa.text("INSERT INTO plans (name) VALUES ('waits')"))
    await woken.beyond(before)


async def test_what_becomes_due_wakes_then_and_not_before(db: AsyncEngine, listen: Listen) -> None:
    async with db.begin() as conn:
        await conn.execute(sa.text("CREATE TABLE due (at timestamptz)"))
        await conn.execute(sa.text("GRANT SELECT ON due TO PUBLIC"))
        await conn.execute(sa.text("INSERT INTO due VALUES (now() + interval '0.5 s')"))
    began = asyncio.get_running_loop().time()
    _, woken = await listen("SELECT min(at) FROM due", apart_s=0.01)
    before = woken.count
    await woken.beyond(before)
    assert asyncio.get_running_loop().time() - began > 0.4


async def test_who_goes_to_rest_is_asked_what_it_left(db: AsyncEngine, listen: Listen) -> None:
    """A retry that it put off itself a moment ago is of no notification."""
    async with db.begin() as conn:
        await conn.execute(sa.text("CREATE TABLE due (at timestamptz)"))
        await conn.execute(sa.text("GRANT SELECT ON due TO PUBLIC"))
    listener, woken = await listen("SELECT min(at) FROM due", apart_s=0.01)
    before = woken.count
    async with db.begin() as conn:
        await conn.execute(sa.text("INSERT INTO due VALUES (now() + interval '0.1 s')"))
    listener.rest_s(1.0)
    await woken.beyond(before)


async def test_behind_a_pooler_of_transactions_everybody_polls(
    own_pool: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes LISTEN, and delivers nothing."""
    monkeypatch.setattr(work_listener, "HEAR_TIMEOUT_S", 0.05)
    monkeypatch.setattr(WorkListener, "_heard", lambda *_: None)
    listener, woken = WorkListener(own_pool), Woken()
    listener.watch("tests", woken)
    listener.start()
    async with asyncio.timeout(PATIENCE_S):
        while "nothing is heard from Postgres" not in caplog.text:
            await asyncio.sleep(0.01)
    assert not listener.is_hearing
    assert listener.rest_s(1.0) == 1.0
    await listener.close()


async def test_without_postgres_everybody_polls_until_it_is_there() -> None:
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/none", pool_size=1)
    listener = WorkListener(nowhere)
    listener.start()
    await asyncio.sleep(0.05)
    assert listener.rest_s(0.5) == 0.5
    await listener.close()
    await nowhere.dispose()


async def test_work_that_is_made_while_its_owner_looks_is_looked_for_again(
    db: AsyncEngine, listen: Listen
) -> None:
    """The machine of no lost wake-up stands on this: a wake during a round is the next round."""
    listener, _ = await listen()
    looking, go_on, rounds = asyncio.Event(), asyncio.Event(), 0

    async def look() -> None:
        nonlocal rounds
        rounds += 1
        looking.set()
        await go_on.wait()

    worker = Periodic(
        "look", lambda: listener.rest_s(60.0), look, log=work_listener.log, failure="not looked"
    )
    listener.watch("looked for", worker.wake)
    worker.start()
    await looking.wait()
    await say(db, "looked for")
    heard = Woken()
    listener.watch("behind", heard)
    await say(db, "behind")
    await heard.beyond(0)
    looking.clear()
    go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        await looking.wait()
    assert rounds == 2
    await worker.close()


async def test_every_table_with_work_has_its_trigger(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        rows = await conn.execute(
            sa.text("""
                SELECT tgrelid::regclass::text AS on_table,
                    rtrim(encode(tgargs, 'escape'), E'\\\\000') AS topic
                FROM pg_trigger WHERE tgfoid = 'tell_of_work'::regproc
            """)
        )
        found = sorted((row.on_table, row.topic) for row in rows)
    later = [(table, VERSIONS.TOPIC) for table in (*VERSIONS.TABLES, "model_rollouts")]
    assert found == sorted([*((each.table, each.topic) for each in WORK.WORK), *later])
