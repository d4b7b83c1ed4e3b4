"""A revoked access token is refused within a second, whatever is broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer import access_tokens, revocations
from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.revocations import (
    CHANNEL,
    ENCODER,
    INTENT,
    KEPT_S,
    MAX_STALENESS_S,
    Denylist,
    Kind,
    Revocation,
    announcing,
    end_grant,
    purge,
)
from gateway.auth.bearer.subjects import find_principal
from gateway.auth.errors import AuthUnavailable, InvalidToken, RevokedToken
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.principal import Plan
from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING
from gateway.tenancy.members.members import add_member, remove_member
from gateway.tenancy.money.plans import sync_plans
from gateway.tenancy.orgs import archive_org, update_org
from tests.databases import counted_queries
from tests.gateway.auth.bearer.revoking import PROMISED_S, a_token, revoke, seconds_until_refused
from tests.gateway.auth.bearer.test_api_keys import Skewed
from tests.gateway.auth.parts import ISSUER, NOW, Clock
from tests.gateway.auth.world import ACTOR, World, open_world
from tests.pace import pace, within


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=10)
    yield engine
    await engine.dispose()


@pytest.fixture
async def world(pool: AsyncEngine, redis: redis.asyncio.Redis) -> AsyncIterator[World]:
    async with open_world(pool, redis) as made:
        yield made


def no_polls(queries: list[str]) -> list[str]:
    """Without those of the denylist's own task, which come now and then whatever is asked."""
    return [each for each in queries if "FROM revocations" not in each]


async def test_a_known_token_costs_no_query(world: World) -> None:
    token = await a_token(world)
    await world.principal(token)
    with counted_queries(world.db) as queries:
        for _ in range(200):
            await world.principal(token)
    assert no_polls(queries) == []
    with counted_queries(world.db) as queries:
        other = await a_token(world)
        before = len(no_polls(queries))
        await asyncio.gather(*(world.principal(other) for _ in range(50)))
    assert len(no_polls(queries)) == before + 1, "50 at once"


@pytest.mark.parametrize("kind", ["grant", "token", "client", "user"])
async def test_each_kind_reaches_every_worker_within_a_second(world: World, kind: Kind) -> None:
    client, _ = await world.client()
    code, grant = await world.code(client)
    token = (await world.redeem(client, code))["access_token"]
    bystander = await a_token(world)
    claims = await world.claims(token)
    subject = {"grant": grant.id, "token": claims.jti, "client": client.id}
    others = [
        AccessTokens(
            db=world.db, redis=world.redis, keys=world.keys, issuer=ISSUER, wall_clock=world.clock
        )
        for _ in range(2)
    ]
    workers = [world.tokens, *others]
    for each in others:
        await each.start()
    for each in workers:
        await each.authenticate(token, feed_as_of=time.monotonic())
    await revoke(world, kind, subject.get(kind, world.user_id))
    waited = await asyncio.gather(*(seconds_until_refused(each, token) for each in workers))
    assert max(waited) < PROMISED_S
    if kind == "user":
        await seconds_until_refused(world.tokens, bystander)
        world.clock.now += 1
        await world.principal(await a_token(world))
    else:
        await world.principal(bystander)
    for each in others:
        await each.close()


async def test_a_fill_that_spans_a_revocation_is_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await a_token(world)
    claims = await world.claims(token)
    reads = 0

    async def overtaken(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        found = await find_principal(*args)
        if reads == 1:
            await revoke(world, "token", claims.jti)
            async with within(1.0):
                while not world.tokens.denylist.denies(claims):
                    await asyncio.sleep(0.005)
        return found

    monkeypatch.setattr(access_tokens, "find_principal", overtaken)
    with pytest.raises(RevokedToken):
        await world.principal(token)
    assert reads == 1 and len(world.tokens._known) == 0


async def test_endless_changes_end_in_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await a_token(world)

    async def overtaken(*args: Any) -> Any:
        world.tokens.changed("key_other")
        return await find_principal(*args)

    monkeypatch.setattr(access_tokens, "find_principal", overtaken)
    with pytest.raises(AuthUnavailable):
        await world.principal(token)


async def test_numbers_become_visible_in_their_order(world: World) -> None:
    async def one(number: int) -> None:
        async with announcing(world.redis, clock=world.clock) as announcement:
            async with world.db.begin() as conn:
                await announcement.revoke(
                    conn, org_id=world.org_id, kind="token", subject=f"jti-{number}"
                )
                await asyncio.sleep(0.001 * (number % 3))

    seen: list[int] = []
    done = asyncio.Event()

    async def watch() -> None:
        last = 0
        while not done.is_set() or last == 0:
            async with world.db.connect() as conn:
                found = sa.text("SELECT seq FROM revocations WHERE seq > :last ORDER BY seq")
                new = list(await conn.scalars(found, {"last": last}))
            seen.extend(new)
            last = max([last, *new])

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(one(number) for number in range(40)))
    await asyncio.sleep(0.05)
    done.set()
    await watching
    assert seen == sorted(seen) and len(seen) == 40, "who reads on has missed none"


async def test_what_follows_is_taken_as_it_is_and_a_gap_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    monkeypatch.setattr(revocations, "HEALTHY_POLL_S", 60.0)
    denylist = world.tokens.denylist
    async with asyncio.timeout(30):
        while not denylist.is_current or denylist._must_poll:
            await asyncio.sleep(0.01)
    with counted_queries(world.db) as queries:
        told = [revocations.Revocation(1, "token", "a", None, NOW + KEPT_S)]
        await world.redis.publish(CHANNEL, revocations.ENCODER.encode(told))
        await asyncio.sleep(0.1)
        assert queries == []
        gap = [revocations.Revocation(3, "token", "b", None, NOW + KEPT_S)]
        await world.redis.publish(CHANNEL, revocations.ENCODER.encode(gap))
        async with asyncio.timeout(30):
            while len(queries) < 1:
                await asyncio.sleep(0.01)
        assert len(queries) == 1 and denylist._last_seq == 1
        await world.redis.publish(CHANNEL, revocations.ENCODER.encode(told))
        await asyncio.sleep(0.1)
        assert len(queries) == 1, "what was read before needs no read"
        await world.redis.publish(CHANNEL, b"nonsense")
        async with asyncio.timeout(30):
            while len(queries) < 2:
                await asyncio.sleep(0.01)


async def test_of_two_revocations_of_a_user_the_later_counts(world: World) -> None:
    first = await a_token(world)
    await revoke(world, "user", world.user_id)
    world.clock.now += 10
    second = await a_token(world)
    await revoke(world, "user", world.user_id)
    await seconds_until_refused(world.tokens, first)
    await seconds_until_refused(world.tokens, second)
    world.clock.now += 1
    await world.principal(await a_token(world))


async def test_an_older_revocation_that_is_read_later_undoes_nothing(world: World) -> None:
    """The feed lost the first of two: what it told of the second stays."""
    await revoke(world, "user", world.user_id)
    world.clock.now += 10
    claims = await world.claims(await a_token(world))
    late = Denylist(world.db, world.redis, lambda each: None, wall_clock=world.clock)
    await revoke(world, "user", world.user_id)
    async with world.db.connect() as conn:
        first, second = await conn.scalars(sa.text("SELECT seq FROM revocations ORDER BY seq"))
    told = Revocation(second, "user", world.user_id, int(world.clock()), world.clock() + KEPT_S)
    late._receive(ENCODER.encode([told]).decode())
    assert second > first and late.denies(claims)
    await late._poll()
    assert late._last_seq == second and late.denies(claims)


async def test_what_one_transaction_revokes_is_told_at_once(world: World) -> None:
    tokens = [await a_token(world) for _ in range(2)]
    jtis = [(await world.claims(each)).jti for each in tokens]
    async with announcing(world.redis, clock=world.clock) as announcement:
        async with world.db.begin() as conn:
            for jti in jtis:
                await announcement.revoke(conn, org_id=world.org_id, kind="token", subject=jti)
    assert [each.subject for each in announcement.revoked] == jtis
    for each in tokens:
        assert await seconds_until_refused(world.tokens, each) < PROMISED_S


async def test_a_process_that_starts_knows_what_was_revoked_before(world: World) -> None:
    token = await a_token(world)
    claims = await world.claims(token)
    await revoke(world, "token", claims.jti)
    late = Denylist(world.db, world.redis, lambda each: None, wall_clock=world.clock)
    await late.start()
    await late.current()
    assert late.denies(claims)
    await late.close()
    await late.close()


async def test_more_than_a_page_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocations, "MAX_READ", 3)
    for number in range(8):
        await revoke(world, "token", f"jti-{number}")
    late = Denylist(world.db, world.redis, lambda each: None, wall_clock=world.clock)
    await late.start()
    await late.current()
    assert len(late._denied) == 8
    await late.close()


async def test_what_refuses_nothing_any_more_is_forgotten(world: World) -> None:
    await revoke(world, "token", "jti-x")
    denylist = world.tokens.denylist
    async with within(1.0):
        while not denylist._denied:
            await asyncio.sleep(0.005)
    assert denylist._sweep() is False
    assert denylist._denied
    world.clock.now += KEPT_S
    denylist._swept_at = -1e9
    assert denylist._sweep() is True
    assert not denylist._denied
    async with world.db.begin() as conn:
        await purge(conn, world.keys.now())
        assert await conn.scalar(sa.text("SELECT count(*) FROM revocations")) == 1
        world.clock.now += 3601
        await purge(conn, world.keys.now())
        assert await conn.scalar(sa.text("SELECT count(*) FROM revocations")) == 0


async def test_old_rows_are_swept_away_by_themselves(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await revoke(world, "token", "jti-x")
    world.clock.now += KEPT_S + 3601
    monkeypatch.setattr(revocations, "SWEEP_S", 0.0)
    async with asyncio.timeout(30):
        async with world.db.connect() as conn:
            while await conn.scalar(sa.text("SELECT count(*) FROM revocations")):
                await conn.rollback()
                await asyncio.sleep(0.02)

    async def lost(*args: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(revocations, "purge", lost)
    async with asyncio.timeout(30):
        while "old revocations stay" not in caplog.text:
            await asyncio.sleep(0.02)


async def test_a_rolled_back_revocation_refuses_nothing(world: World) -> None:
    token = await a_token(world)
    claims = await world.claims(token)
    with pytest.raises(ZeroDivisionError):
        async with announcing(world.redis, clock=world.clock) as announcement:
            async with world.db.begin() as conn:
                await announcement.revoke(
                    conn, org_id=world.org_id, kind="token", subject=claims.jti
                )
                raise ZeroDivisionError
    await revoke(world, "token", "another")
    await asyncio.sleep(0.2)
    await world.principal(token)


async def test_ending_a_grant_twice_is_told_twice(world: World) -> None:
    client, _ = await world.client()
    _, grant = await world.code(client)
    news = []
    for _ in range(2):
        async with announcing(world.redis, clock=world.clock) as announcement:
            async with world.db.begin() as conn:
                news.append(
                    await end_grant(
                        conn,
                        announcement,
                        org_id=world.org_id,
                        grant_id=grant.id,
                        because="test",
                        actor=ACTOR,
                    )
                )
    assert news == [True, False]


async def test_archives_and_plans_take_effect_at_once(world: World, db: AsyncEngine) -> None:
    token = await a_token(world)
    await world.principal(token)
    async with db.begin() as conn:
        await sync_plans(conn, [Plan(name="small", tokens_per_minute=600)])
    await update_org(world.db, world.redis, world.org_id, {"plan": "small"}, actor=COMMAND_LINE)
    world.tokens.changed(EVERYTHING)
    assert (await world.principal(token)).org_plan.name == "small"
    await archive_org(world.db, world.redis, world.org_id, actor=COMMAND_LINE)
    for subject in (world.org_id, world.user_id, world.project_id):
        world.tokens.changed(subject)
        with pytest.raises(RevokedToken):
            await world.principal(token)


async def test_a_demotion_takes_effect_when_it_is_announced(world: World, db: AsyncEngine) -> None:
    token = await a_token(world)
    assert (await world.principal(token)).role == "developer"
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE users SET role = 'reader'"))
    assert (await world.principal(token)).role == "developer"
    world.tokens.changed(world.user_id)
    assert (await world.principal(token)).role == "reader"


async def test_who_leaves_a_project_takes_no_token_of_it_along(world: World) -> None:
    client, _ = await world.client(project_id=None)
    names = {"org_id": world.org_id, "project_id": world.project_id, "user_id": world.user_id}
    async with world.db.begin() as conn:
        await add_member(conn, **names, role="member", actor=ACTOR)
    token = str((await world.login(client))["access_token"])
    assert (await world.principal(token)).project_id == world.project_id
    async with world.db.begin() as conn:
        await remove_member(conn, **names, actor=ACTOR)
    world.tokens.changed(world.user_id)
    with pytest.raises(RevokedToken):
        await world.principal(token)
    # The client's own project is open to whoever may use the client; an admin is at home in all.
    await world.principal(await a_token(world))
    async with world.db.begin() as conn:
        await conn.execute(sa.text("UPDATE users SET role = 'admin'"))
    world.tokens.changed(world.user_id)
    assert (await world.principal(token)).role == "admin"


async def test_an_answer_is_not_trusted_for_long_without_the_feed(world: World) -> None:
    clock = Skewed()
    tokens = AccessTokens(
        db=world.db,
        redis=world.redis,
        keys=world.keys,
        issuer=ISSUER,
        clock=clock,
        wall_clock=world.clock,
    )
    await tokens.start()
    token = await a_token(world)
    heard = clock()
    await tokens.authenticate(token, feed_as_of=heard)
    clock.ahead_s += changes.MAX_STALENESS_S + 0.1
    with counted_queries(world.db) as queries:
        await tokens.authenticate(token, feed_as_of=heard)
    assert any("FROM orgs" in each for each in queries)
    await tokens.close()


async def test_a_withdrawn_key_takes_its_tokens_with_it(world: World) -> None:
    token = await a_token(world)
    await world.principal(token)
    kid = world.keys.ring.active.kid
    assert kid is not None
    async with world.db.begin() as conn:
        await signing_keys.revoke(conn, world.keys.cipher, kid, world.keys.now())
    await world.keys.reload()
    with pytest.raises(InvalidToken):
        await world.principal(token)


async def test_a_withdrawn_key_is_believed_nowhere_within_a_second(world: World) -> None:
    """By another process, long before it would read its key ring again."""
    keys = KeyRing(world.db, world.keys.cipher, clock=world.clock)
    tokens = AccessTokens(
        db=world.db, redis=world.redis, keys=keys, issuer=ISSUER, wall_clock=world.clock
    )
    await asyncio.gather(keys.start(), tokens.start())
    token = await a_token(world)
    await tokens.authenticate(token, feed_as_of=time.monotonic())
    kid = keys.ring.active.kid or ""
    stale = keys.ring
    async with announcing(world.redis, clock=world.clock) as told, world.db.begin() as conn:
        await signing_keys.revoke(conn, keys.cipher, kid, keys.now())
        await told.revoke(conn, org_id=world.org_id, kind="key", subject=kid)
    async with asyncio.timeout(30), pace() as seconds:
        with pytest.raises(InvalidToken):
            while True:
                await tokens.authenticate(token, feed_as_of=time.monotonic())
                await asyncio.sleep(0.005)
        assert seconds() < PROMISED_S
    async with asyncio.timeout(30):
        while True:
            try:
                assert keys.ring.active.kid != kid
                break
            except AuthUnavailable:
                await asyncio.sleep(0.005)
    keys._take(stale)  # of a read that began before
    with pytest.raises(AuthUnavailable):
        _ = keys.ring  # until the next read, which `verifier` may be
    assert await keys.verifier(kid) is None
    keys.withdraw(kid)
    await tokens.close()
    await keys.close()


async def test_a_key_may_be_withdrawn_before_any_is_known(world: World) -> None:
    keys = KeyRing(world.db, world.keys.cipher, clock=world.clock)
    kid = world.keys.ring.active.kid or ""
    keys.withdraw(kid)
    await keys.reload()
    assert await keys.verifier(kid) is None


async def test_closing_ends_the_reads_under_way(world: World) -> None:
    token = await a_token(world)
    tokens = AccessTokens(
        db=world.db, redis=world.redis, keys=world.keys, issuer=ISSUER, wall_clock=world.clock
    )
    await tokens.start()
    await tokens.denylist.current()
    async with world.db.connect() as blocker:
        await blocker.execute(sa.text("SELECT 1"))
    gate = asyncio.Event()

    async def stuck(*args: Any) -> Any:
        gate.set()
        await asyncio.sleep(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access_tokens, "find_principal", stuck)
        pending = asyncio.create_task(tokens.authenticate(token, feed_as_of=time.monotonic()))
        await gate.wait()
        await tokens.close()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert len(tokens._reads) == 0


def test_the_promise_leaves_room() -> None:
    assert revocations.POLL_S < 0.5 and MAX_STALENESS_S < PROMISED_S
    assert INTENT != EVERYTHING.encode() and Clock()() == NOW
