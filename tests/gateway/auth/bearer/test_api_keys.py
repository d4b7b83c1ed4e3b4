"""From a key to a principal on a real Postgres and a real Redis: caching, and revocation within a
second."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import connect_redis
from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer import api_keys, key_reader
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.errors import AuthError, AuthUnavailable, ExpiredKey, InvalidKey, RevokedKey
from gateway.db import create_engine
from gateway.home import Home
from gateway.lru import Lru, WeighedLru
from gateway.principal import UNLIMITED, Plan
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import Child
from gateway.tenancy import changes
from gateway.tenancy.changes import CHANNEL
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.tenancy.keys.keys import CreatedKey, create_key, revoke_key
from gateway.tenancy.keys.records import find_keys
from gateway.tenancy.money.plans import sync_plans
from gateway.tenancy.orgs import archive_org, create_org, update_org
from gateway.tenancy.projects import create_project
from tests.databases import counted_queries, with_cluster
from tests.pace import pace, within

PEPPER, PEPPER_ID = b"p" * 32, "pepper-1"
PLAN = Plan(name="small", tokens_per_minute=600)
PROMISED_S = 1.0
UNKNOWN_KEY = "sk-tg-" + "0" * 43


async def make_key(db: AsyncEngine, *, expires_at: datetime | None = None) -> CreatedKey:
    async with db.begin() as conn:
        await sync_plans(conn, [PLAN])
        org = await create_org(conn, name="acme", actor=COMMAND_LINE)
        org_id, me = org.id, COMMAND_LINE
        project = await create_project(conn, org_id=org_id, name="web", plan="small", actor=me)
        return await create_key(
            conn,
            org_id=org_id,
            project_id=project.id,
            name="laptop",
            scopes=["inference"],
            pepper=PEPPER,
            pepper_id=PEPPER_ID,
            expires_at=expires_at,
            actor=COMMAND_LINE,
        )


@asynccontextmanager
async def authenticating(
    db: AsyncEngine, store: redis.asyncio.Redis, **options: Any
) -> AsyncIterator[Authenticator]:
    authenticator = Authenticator(db=db, redis=store, pepper=PEPPER, pepper_id=PEPPER_ID, **options)
    await authenticator.start()
    yield authenticator
    await authenticator.close()


class Skewed:
    """Monotonic seconds, plus what a test adds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def seconds_until_refused(authenticator: Authenticator, key: str) -> float:
    """Call without pause until the key is refused."""
    async with asyncio.timeout(30), pace() as seconds:
        while True:
            try:
                await authenticator.authenticate(key)
            except RevokedKey:
                return seconds()
            await asyncio.sleep(0.002)


async def test_a_good_key_becomes_its_principal_with_one_query(
    db: AsyncEngine, redis: redis.asyncio.Redis, patient: None
) -> None:
    created = await make_key(db)
    async with authenticating(db, redis) as authenticator:
        with counted_queries(db) as queries:
            together = await asyncio.gather(
                *(authenticator.authenticate(created.secret) for _ in range(50))
            )
            for _ in range(100):
                principal = await authenticator.authenticate(created.secret)
        assert len(queries) == 1, "50 at once and 100 one after the other"
    assert all(each == principal for each in together)
    row = created.row
    assert (principal.org_id, principal.project_id) == (row.org_id, row.project_id)
    assert (principal.key_id, principal.key_hint) == (row.id, row.hint)
    assert principal.scopes == {"inference"} and principal.expires_at is None
    assert principal.key_plan == principal.org_plan == UNLIMITED
    assert principal.project_plan == PLAN


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "sk-tg-",
        "sk-tg-" + "a" * 42,
        "sk-tg-" + "a" * 44,
        "sk-tg-" + "a" * 42 + "\n",
        "sk-tg-" + "a" * 42 + "é",
        "sk-tg-" + "a" * 42 + "٣",
        "sk-tg-admin-" + "a" * 37,
        "SK-TG-" + "a" * 43,
        "sk-tg-" + "a" * 1_000_000,
        "sk-tg-" + "a" * 43 + "\x00",
    ],
)
async def test_garbage_never_reaches_postgres(
    db: AsyncEngine, redis: redis.asyncio.Redis, garbage: str
) -> None:
    authenticator = Authenticator(db=db, redis=redis, pepper=PEPPER, pepper_id=PEPPER_ID)
    with counted_queries(db) as queries, pytest.raises(InvalidKey, match="^malformed$"):
        await authenticator.authenticate(garbage)
    assert queries == []


async def test_an_unknown_key_is_looked_up_once_in_a_while(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    clock = Skewed()
    async with authenticating(db, redis, clock=clock) as authenticator:
        with counted_queries(db) as queries:
            for _ in range(10):
                with pytest.raises(InvalidKey, match="^unknown$"):
                    await authenticator.authenticate(UNKNOWN_KEY)
            assert len(queries) == 1
            clock.ahead_s += api_keys.REFUSAL_TTL_S
            with pytest.raises(InvalidKey):
                await authenticator.authenticate(UNKNOWN_KEY)
            assert len(queries) == 2


async def test_a_key_under_another_pepper_is_unknown(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    for pepper, pepper_id in ((b"q" * 32, PEPPER_ID), (PEPPER, "pepper-2")):
        other = Authenticator(db=db, redis=redis, pepper=pepper, pepper_id=pepper_id)
        with pytest.raises(InvalidKey):
            await other.authenticate(created.secret)


async def test_a_key_expires_by_the_clock_and_not_by_the_cache(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    expires_at = datetime.now(tz=UTC) + timedelta(hours=1)
    created = await make_key(db, expires_at=expires_at)
    now = [expires_at.timestamp() - 0.001]
    async with authenticating(db, redis, wall_clock=lambda: now[0]) as authenticator:
        principal = await authenticator.authenticate(created.secret)
        assert principal.expires_at == pytest.approx(expires_at.timestamp(), abs=1e-5)
        now[0] += 0.001
        with pytest.raises(ExpiredKey):
            await authenticator.authenticate(created.secret)


async def test_a_revocation_reaches_every_worker_within_a_second(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    async with (
        authenticating(db, redis) as first,
        authenticating(db, redis) as second,
        authenticating(db, redis) as bystander,
    ):
        for each in (first, second, bystander):
            await each.authenticate(created.secret)
        await revoke_key(db, redis, created.row.id, org_id=created.row.org_id, actor=COMMAND_LINE)
        waited = await asyncio.gather(
            *(seconds_until_refused(each, created.secret) for each in (first, second, bystander))
        )
    assert max(waited) < PROMISED_S


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_revocation_is_seen_within_a_second_without_redis(
    db: AsyncEngine, own_redis: tuple[redis.asyncio.Redis, Child], trouble: signal.Signals
) -> None:
    """Killed, connections break; stopped, they look alive and are silent."""
    created = await make_key(db)
    store, server = own_redis
    async with authenticating(db, store) as authenticator:
        await authenticator.authenticate(created.secret)
        server.send_signal(trouble)
        work = revoke_key(db, store, created.row.id, org_id=created.row.org_id, actor=COMMAND_LINE)
        revoking = asyncio.create_task(work)
        async with asyncio.timeout(30):
            async with db.connect() as conn:
                revoked = sa.text("SELECT 1 FROM api_keys WHERE revoked_at IS NOT NULL")
                while await conn.scalar(revoked) is None:
                    await conn.rollback()
                    await asyncio.sleep(0.001)
        assert await seconds_until_refused(authenticator, created.secret) < PROMISED_S
        with pytest.raises(ChangeNotAnnounced):
            await revoking


async def test_without_redis_known_keys_work_and_are_read_about_once_a_second(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_reader, "READ_TIMEOUT_S", 60.0)
    created = await make_key(db)
    nowhere = connect_redis("redis://127.0.0.1:1")
    authenticator = Authenticator(db=db, redis=nowhere, pepper=PEPPER, pepper_id=PEPPER_ID)
    async with within(4.0):
        await authenticator.start()
    calls, started = 0, time.monotonic()
    with counted_queries(db) as queries:
        async with asyncio.timeout(60):
            while len(queries) < 3:
                await authenticator.authenticate(created.secret)
                calls += 1
                await asyncio.sleep(0.002)
    elapsed = time.monotonic() - started
    await authenticator.close()
    await nowhere.aclose()
    assert len(queries) <= 1 + elapsed / changes.MAX_STALENESS_S
    assert calls > len(queries), "in between nobody asks"


async def test_what_was_missed_while_redis_was_away_is_not_trusted_afterwards(
    db: AsyncEngine, own_home: Home, own_redis: tuple[redis.asyncio.Redis, Child]
) -> None:
    created = await make_key(db)
    store, server = own_redis
    async with authenticating(db, store) as authenticator:
        await authenticator.authenticate(created.secret)
        await server.stop(5)
        row = created.row
        with pytest.raises(ChangeNotAnnounced):
            await revoke_key(db, store, row.id, org_id=row.org_id, actor=COMMAND_LINE)
        again = await embedded.start_redis(own_home, durable=False)
        try:
            assert await seconds_until_refused(authenticator, created.secret) < PROMISED_S
            # and it listens again: an announcement is handled, a known key costs no query
            other = await make_second_key(db, created)
            heard = authenticator._listener.as_of
            async with asyncio.timeout(30):
                while authenticator._listener.as_of == heard:
                    await asyncio.sleep(0.01)
                await authenticator.authenticate(other.secret)
                known_at = authenticator._listener.as_of
                while authenticator._listener.as_of < known_at + 2 * changes.MAX_STALENESS_S:
                    await asyncio.sleep(0.01)
            with counted_queries(db) as queries:
                await authenticator.authenticate(other.secret)
            assert queries == []
            await revoke_key(db, store, other.row.id, org_id=other.row.org_id, actor=COMMAND_LINE)
            assert await seconds_until_refused(authenticator, other.secret) < PROMISED_S
        finally:
            await again.stop(5)


async def make_second_key(db: AsyncEngine, created: CreatedKey) -> CreatedKey:
    async with db.begin() as conn:
        return await create_key(
            conn,
            org_id=created.row.org_id,
            project_id=created.row.project_id,
            name="second",
            scopes=["inference"],
            pepper=PEPPER,
            pepper_id=PEPPER_ID,
            actor=COMMAND_LINE,
        )


async def test_an_answer_overtaken_by_an_announcement_is_read_again(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    async with authenticating(db, redis) as authenticator:
        with counted_queries(db) as queries:
            async with db.connect() as blocker:
                await blocker.execute(sa.text("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE"))
                pending = asyncio.create_task(authenticator.authenticate(created.secret))
                async with asyncio.timeout(30):
                    while len(queries) < 2:
                        await asyncio.sleep(0.005)
                    changes = authenticator._changes
                    await redis.publish(CHANNEL, created.row.id)
                    while authenticator._changes == changes:
                        await asyncio.sleep(0.005)
                assert not pending.done()
                await blocker.rollback()
            assert (await pending).key_id == created.row.id
        assert len(queries) == 3, "the lock, the overtaken read, the one that counts"


async def test_endless_announcements_end_in_an_error(
    db: AsyncEngine, redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = await make_key(db)
    authenticator = Authenticator(db=db, redis=redis, pepper=PEPPER, pepper_id=PEPPER_ID)

    async def overtaken(*args: object, **kwargs: object) -> object:
        authenticator._changed("key_other")
        return await find_keys(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(key_reader, "find_keys", overtaken)
    with counted_queries(db) as queries, pytest.raises(AuthUnavailable):
        await authenticator.authenticate(created.secret)
    assert len(queries) == api_keys.MAX_READS


async def test_archives_and_plans_take_effect_at_once(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    async with authenticating(db, redis) as authenticator:
        assert (await authenticator.authenticate(created.secret)).org_plan == UNLIMITED
        await update_org(db, redis, created.row.org_id, {"plan": "small"}, actor=COMMAND_LINE)
        async with within(PROMISED_S):
            while (await authenticator.authenticate(created.secret)).org_plan != PLAN:
                await asyncio.sleep(0.005)
        await archive_org(db, redis, created.row.org_id, actor=COMMAND_LINE)
        assert await seconds_until_refused(authenticator, created.secret) < PROMISED_S


async def test_limits_that_changed_silently_are_seen_after_a_while(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    clock = Skewed()
    async with authenticating(db, redis, clock=clock) as authenticator:
        await authenticator.authenticate(created.secret)
        bigger = Plan(name="small", tokens_per_minute=1200)
        async with db.begin() as conn:
            await sync_plans(conn, [bigger])
        heard = authenticator._listener.as_of
        clock.ahead_s += api_keys.REFRESH_S
        async with asyncio.timeout(30):
            while authenticator._listener.as_of < heard + api_keys.REFRESH_S:
                await asyncio.sleep(0.01)
            assert (await authenticator.authenticate(created.secret)).project_plan == PLAN
            while (await authenticator.authenticate(created.secret)).project_plan != bigger:
                await asyncio.sleep(0.005)


async def test_keys_that_are_asked_for_at_once_share_a_query(
    db: AsyncEngine, redis: redis.asyncio.Redis, patient: None
) -> None:
    first = await make_key(db)
    others = [await make_second_key(db, first) for _ in range(3)]
    keys = [first.secret, *(each.secret for each in others), UNKNOWN_KEY]
    async with authenticating(db, redis) as authenticator:
        with counted_queries(db) as queries:
            found = await asyncio.gather(
                *(authenticator.authenticate(each) for each in keys), return_exceptions=True
            )
        assert len(queries) == 1
    *principals, unknown = found
    wanted = [first.row.id, *(each.row.id for each in others)]
    assert [getattr(each, "key_id", None) for each in principals] == wanted
    assert isinstance(unknown, InvalidKey)


async def test_keys_in_use_are_read_again_no_more_often_than_they_should(
    db: AsyncEngine, redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_REFRESHED", 1)
    monkeypatch.setattr(api_keys, "REFRESH_INTERVAL_S", 1.9)
    first = await make_key(db)
    keys = [first.secret, (await make_second_key(db, first)).secret]
    monkeypatch.setattr(api_keys, "REFRESH_S", 0.0)
    clock = Skewed()
    async with authenticating(db, redis, clock=clock) as authenticator:
        for each in keys:
            await authenticator.authenticate(each)
        for each in keys:
            await authenticator.authenticate(each)
        assert not authenticator._stale, "with two keys each is read again after two rounds"
        clock.ahead_s += len(keys) * api_keys.REFRESH_INTERVAL_S
        async with asyncio.timeout(30):
            while authenticator._listener.as_of < clock() - changes.MAX_STALENESS_S / 2:
                await asyncio.sleep(0.01)
            with counted_queries(db) as queries:
                for each in keys:
                    await authenticator.authenticate(each)
                assert len(authenticator._stale) == 1
                while not queries:
                    await asyncio.sleep(0.01)
        assert not authenticator._stale and len(queries) == 1


@pytest.fixture(scope="module")
def patient_with_stores() -> None:
    """Nobody waits longer than in a product."""


@pytest.fixture
async def own_postgres(own_home: Home) -> AsyncIterator[tuple[AsyncEngine, list[Child]]]:
    """The last of the servers is the one that runs."""
    with_cluster(own_home)
    servers = [await embedded.start_postgres(own_home)]
    db = create_engine(embedded.postgres_url(own_home))
    yield db, servers
    await db.dispose()
    await servers[-1].stop(10)


async def test_without_postgres_known_keys_work_for_a_while(
    own_home: Home,
    own_postgres: tuple[AsyncEngine, list[Child]],
    redis: redis.asyncio.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    db, servers = own_postgres
    clock = Skewed()
    created = await make_key(db)
    async with authenticating(db, redis, clock=clock) as authenticator:

        async def time_passes(seconds: float) -> None:
            """Until the listener has heard of it."""
            heard = authenticator._listener.as_of
            clock.ahead_s += seconds
            async with asyncio.timeout(30):
                while authenticator._listener.as_of < heard + seconds:
                    await asyncio.sleep(0.01)

        await authenticator.authenticate(created.secret)
        servers[0].send_signal(signal.SIGKILL)
        await servers[0].wait()
        embedded.end_orphans(own_home.postgres)  # a backend may answer once more before it leaves
        for _ in range(2):
            with pytest.raises(AuthUnavailable):
                await authenticator.authenticate(UNKNOWN_KEY)
        for _ in range(2):
            await time_passes(0.4 * api_keys.MAX_AGE_S)
            for _ in range(20):
                await authenticator.authenticate(created.secret)
                await asyncio.sleep(0.002)
        await time_passes(0.4 * api_keys.MAX_AGE_S)
        with pytest.raises(AuthUnavailable):
            await authenticator.authenticate(created.secret)
        said = [record for record in caplog.records if record.name == api_keys.__name__]
        assert len(said) == 1, "an outage is logged once"
        assert created.secret not in caplog.text
        servers.append(await embedded.start_postgres(own_home))
        assert (await authenticator.authenticate(created.secret)).key_id == created.row.id


async def test_closing_ends_the_reads_under_way(
    db: AsyncEngine, redis: redis.asyncio.Redis
) -> None:
    created = await make_key(db)
    async with db.connect() as blocker:
        await blocker.execute(sa.text("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE"))
        async with authenticating(db, redis) as authenticator:
            pending = asyncio.create_task(authenticator.authenticate(created.secret))
            async with asyncio.timeout(30):
                while not authenticator._reads:
                    await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert len(authenticator._reads) == 0


def test_no_error_of_a_credential_tells_which() -> None:
    faces = {error.public_message for error in (InvalidKey, ExpiredKey, RevokedKey)}
    assert faces == {AuthError.public_message}


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40))
def test_what_weighs_too_much_is_forgotten(size: int, steps: list[tuple[int, int]]) -> None:
    lru: WeighedLru[int, int] = WeighedLru(size, lambda weight: weight)
    for key, weight in steps:
        if weight:
            lru.put(key, weight)
            assert lru.get(key) == (weight if weight <= size else None)
        else:
            lru.drop(key)
        assert lru.size == sum(lru.values()) <= size
    lru.drop_where(lambda weight: weight % 2 == 0)
    assert lru.size == sum(lru.values())
    lru.clear()
    assert (lru.size, len(lru)) == (0, 0)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_the_least_recently_used_is_forgotten(size: int, steps: list[tuple[int, bool]]) -> None:
    lru: Lru[int, int] = Lru(size)
    order: list[int] = []
    for key, puts in steps:
        if puts:
            lru.put(key, -key)
        else:
            assert lru.get(key) == (-key if key in order else None)
        if puts or key in order:
            order = [other for other in order if other != key] + [key]
        order = order[-size:]
        assert len(lru) == len(order)
    assert {key for key in range(6) if lru.get(key) is not None or key in order} == set(order)
    lru.drop_where(lambda value: value % 2 == 0)
    assert all(lru.get(key) is None for key in range(0, 6, 2))
    lru.drop(1)
    lru.drop(1)
    assert lru.get(1) is None
    lru.clear()
    assert len(lru) == 0
