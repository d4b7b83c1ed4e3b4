"""A revoked access token is refused within a second with Redis dead, silent or back, and without
Postgres nobody is let in who was not known."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import connect_redis
from gateway.auth.bearer import revocations
from gateway.auth.bearer.revocations import Announcement, Denylist, Revocation, announcing
from gateway.auth.errors import AuthUnavailable, ExpiredToken
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import Child
from gateway.tenancy.changes import EVERYTHING
from gateway.tenancy.errors import ChangeNotAnnounced
from gateway.worker import work_listener
from tests.databases import counted_queries, with_cluster
from tests.gateway.auth.bearer.revoking import PROMISED_S, a_token, revoke, seconds_until_refused
from tests.gateway.auth.world import World, open_world
from tests.pace import pace


@pytest.fixture(scope="module")
def patient_with_stores() -> None:
    """Nobody waits longer than in a product."""


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=10)
    yield engine
    await engine.dispose()


@pytest.fixture
async def world(pool: AsyncEngine, redis: redis.asyncio.Redis) -> AsyncIterator[World]:
    async with open_world(pool, redis) as made:
        yield made


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_revocation_is_seen_within_a_second_without_redis(
    pool: AsyncEngine, own_redis: tuple[redis.asyncio.Redis, Child], trouble: signal.Signals
) -> None:
    store, server = own_redis
    async with open_world(pool, store) as world:
        token = await a_token(world)
        await world.principal(token)
        server.send_signal(trouble)
        claims = await world.claims(token)
        revoking = asyncio.create_task(revoke(world, "token", claims.jti))
        async with asyncio.timeout(30):
            async with pool.connect() as conn:
                while await conn.scalar(sa.text("SELECT 1 FROM revocations")) is None:
                    await conn.rollback()
                    await asyncio.sleep(0.001)
        assert await seconds_until_refused(world.tokens, token) < PROMISED_S
        with pytest.raises(ChangeNotAnnounced):
            await revoking


async def test_without_redis_good_tokens_work_and_postgres_is_polled_twice_a_second(
    pool: AsyncEngine, own_redis: tuple[redis.asyncio.Redis, Child]
) -> None:
    store, server = own_redis
    async with open_world(pool, store) as world:
        token = await a_token(world)
        await world.principal(token)
        await server.stop(5)
        await asyncio.sleep(1)
        with counted_queries(pool) as queries:
            started = time.monotonic()
            async with asyncio.timeout(60):
                while (polls := sum("FROM revocations" in each for each in queries)) < 4:
                    await world.principal(token)
                    await asyncio.sleep(0.005)
            elapsed = time.monotonic() - started
        assert polls <= 1 + elapsed / revocations.POLL_S
        # A process that was kept from polling reads the token's principal again.
        assert len(queries) - polls <= elapsed / revocations.MAX_STALENESS_S


async def test_what_was_missed_while_redis_was_away_is_read_when_it_is_back(
    pool: AsyncEngine, own_home: Home, own_redis: tuple[redis.asyncio.Redis, Child]
) -> None:
    store, server = own_redis
    async with open_world(pool, store) as world:
        token = await a_token(world)
        await world.principal(token)
        await server.stop(5)
        claims = await world.claims(token)
        with pytest.raises(ChangeNotAnnounced):
            await revoke(world, "token", claims.jti)
        again = await embedded.start_redis(own_home, durable=False)
        assert await seconds_until_refused(world.tokens, token) < PROMISED_S
        await again.stop(5)


async def test_who_revokes_without_redis_is_noticed_by_those_who_have_it(world: World) -> None:
    """The others' feed is healthy all along: it is the sequence in Postgres that tells them."""
    token = await a_token(world)
    claims = await world.claims(token)
    await world.principal(token)
    async with asyncio.timeout(30):
        while world.tokens.denylist._behind:
            await asyncio.sleep(0.01)
    nowhere = connect_redis("redis://127.0.0.1:1")
    with pytest.raises(ChangeNotAnnounced):
        async with announcing(nowhere, clock=world.clock) as told, world.db.begin() as conn:
            await told.revoke(conn, org_id=world.org_id, kind="token", subject=claims.jti)
    assert await seconds_until_refused(world.tokens, token) < PROMISED_S
    await nowhere.aclose()


async def test_who_reads_of_a_revocation_that_nobody_announces_announces_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that revoked is cut off from Redis, and one process misses the notification of
    Postgres: it would not look for half a minute."""

    async def nothing() -> list[Revocation]:
        return []

    token = await a_token(world)
    claims = await world.claims(token)
    await world.principal(token)
    deaf = Denylist(world.db, world.redis, lambda each: None, wall_clock=world.clock)
    await deaf.start()
    await deaf.current()
    monkeypatch.setattr(deaf, "_read", nothing)
    nowhere = connect_redis("redis://127.0.0.1:1")
    with pytest.raises(ChangeNotAnnounced):
        async with announcing(nowhere, clock=world.clock) as told, world.db.begin() as conn:
            await told.revoke(conn, org_id=world.org_id, kind="token", subject=claims.jti)
    async with asyncio.timeout(30):
        while not deaf.denies(claims):
            await asyncio.sleep(0.01)
    await deaf.close()
    await nowhere.aclose()


async def test_a_notification_of_postgres_is_repeated_until_redis_has_the_revocation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await a_token(world)
    claims = await world.claims(token)
    heard, has_heard_twice = list[str](), asyncio.Event()

    def hear(_conn: object, _pid: int, _channel: str, topic: object) -> None:
        heard.append(str(topic))
        if heard.count(revocations.WORK) >= 3:
            has_heard_twice.set()

    async def publish(redis: redis.asyncio.Redis, message: bytes) -> bool:
        return has_heard_twice.is_set()

    monkeypatch.setattr(revocations, "publish", publish)
    monkeypatch.setattr(revocations, "REPEAT_FOR_S", 30.0)
    async with world.db.connect() as conn:
        driver = (await conn.get_raw_connection()).driver_connection
        assert driver is not None
        await driver.add_listener(work_listener.CHANNEL, hear)
        await revoke(world, "token", claims.jti)
        await driver.remove_listener(work_listener.CHANNEL, hear)
    assert has_heard_twice.is_set(), "the trigger's own, and others"


async def test_a_process_that_missed_something_is_not_current_before_it_has_read_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    denylist = world.tokens.denylist
    await denylist.current()
    reading, go_on = asyncio.Event(), asyncio.Event()
    read = denylist._read

    async def slow() -> list[Revocation]:
        reading.set()
        await go_on.wait()
        return await read()

    monkeypatch.setattr(denylist, "_read", slow)
    denylist._receive(EVERYTHING)
    await reading.wait()
    await asyncio.sleep(revocations.MAX_STALENESS_S)
    assert not denylist.is_current, "the feed is healthy, and says nothing of what was missed"
    go_on.set()
    await denylist.current()


async def test_a_gateway_that_dies_between_commit_and_announcement_has_warned(
    world: World,
) -> None:
    token = await a_token(world)
    claims = await world.claims(token)
    await world.principal(token)
    await asyncio.sleep(0.5)
    announcement = Announcement(world.redis, world.clock)
    async with world.db.begin() as conn:
        await announcement.revoke(conn, org_id=world.org_id, kind="token", subject=claims.jti)
    assert announcement.warned
    assert await seconds_until_refused(world.tokens, token) < PROMISED_S


async def test_without_postgres_known_tokens_work_until_they_expire(
    own_home: Home, redis: redis.asyncio.Redis, patient: None
) -> None:
    with_cluster(own_home)
    server = await embedded.start_postgres(own_home)
    db = create_engine(embedded.postgres_url(own_home))
    async with open_world(db, redis) as world:
        token = await a_token(world)
        unseen = await a_token(world)
        await world.principal(token)
        server.send_signal(signal.SIGKILL)
        await server.wait()
        denylist, killed_at = world.tokens.denylist, world.tokens._clock()
        async with asyncio.timeout(60):
            while denylist.as_of < killed_at + 1.5:  # Redis alone keeps it current
                await world.principal(token)
                await asyncio.sleep(0.01)
        with pytest.raises(AuthUnavailable):
            await world.principal(unseen)
        with pytest.raises(AuthUnavailable):
            await world.tokens.verify(unseen)
        world.clock.now += 600
        with pytest.raises(ExpiredToken):
            await world.principal(token)
    await db.dispose()


async def test_without_both_nobody_is_let_in(own_home: Home) -> None:
    with_cluster(own_home)
    postgres = await embedded.start_postgres(own_home)
    valkey = await embedded.start_redis(own_home, durable=False)
    store = connect_redis(embedded.redis_url(own_home))
    db = create_engine(embedded.postgres_url(own_home))
    async with open_world(db, store) as world:
        token = await a_token(world)
        await world.principal(token)
        for server in (postgres, valkey):
            server.send_signal(signal.SIGKILL)
            await server.wait()
        async with asyncio.timeout(30), pace() as seconds:
            with pytest.raises(AuthUnavailable):
                while True:
                    await world.principal(token)
                    await asyncio.sleep(0.01)
            assert seconds() < 2 * PROMISED_S
    await store.aclose()
    await db.dispose()
