"""A key is changed, rotated and ended after it was made, on a real Postgres and a real Redis."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.audit.tables import entries
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.errors import AuthError, InvalidKey, RevokedKey
from gateway.db import tenant
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.changes import (
    MAX_GRACE_S,
    report_leak,
    rotate_key,
    update_key,
)
from gateway.tenancy.keys.keys import CreatedKey, KeyRow, create_key, retrieve_key, revoke_key
from gateway.tenancy.keys.restrictions import Restrictions
from gateway.tenancy.tables import api_keys
from tests.gateway.auth.bearer.test_api_keys import PEPPER, PEPPER_ID, authenticating, make_key
from tests.pace import within

ALICE = Actor(kind="user", id="user_alice", ip="203.0.113.9", request_id="req_1")
NEW = {"pepper": PEPPER, "pepper_id": PEPPER_ID}
SECOND_S = 1.0
"""Every worker knows of a change within this time."""


async def row_of(db: AsyncEngine, created: CreatedKey) -> KeyRow:
    async with tenant(db, created.row.org_id) as conn:
        return await retrieve_key(conn, created.row.id, org_id=created.row.org_id)


async def audited(db: AsyncEngine) -> list[tuple[str, str, str | None, str | None]]:
    """(action, actor, before, after) of keys, oldest first."""
    columns = (entries.c.action, entries.c.actor_id, entries.c.before, entries.c.after)
    listed = sa.select(*columns).where(entries.c.action.startswith("api_key."))
    async with db.connect() as conn:
        return [tuple(row) for row in await conn.execute(listed.order_by(entries.c.sequence))]


async def until_refused(authenticator: Authenticator, key: str) -> type[AuthError]:
    async with within(SECOND_S):
        while True:
            try:
                await authenticator.authenticate(key)
            except AuthError as error:
                return type(error)
            await asyncio.sleep(0.005)


async def test_a_key_is_made_with_all_that_narrows_it(db: AsyncEngine) -> None:
    created = await make_key(db)
    wanted = Restrictions(
        models=["b", "a", "a"],
        ip_ranges=["192.0.2.1", "2001:db8::/32"],
        tokens_per_minute=5,
        max_concurrent_streams=0,
        lane="agentic",
    )
    async with tenant(db, created.row.org_id) as conn:
        made = await create_key(
            conn,
            org_id=created.row.org_id,
            project_id=created.row.project_id,
            name="narrow",
            scopes=["inference"],
            restrictions=wanted,
            actor=ALICE,
            **NEW,
        )
    row = await row_of(db, made)
    assert row == made.row
    assert (row.models, row.ip_ranges) == (["a", "b"], ["192.0.2.1/32", "2001:db8::/32"])
    assert (row.tokens_per_minute, row.requests_per_minute) == (5, None)
    assert (row.max_concurrent_streams, row.lane) == (0, "agentic")
    action, actor, before, after = (await audited(db))[-1]
    assert (action, actor, before) == ("api_key.created", "user_alice", None)
    assert after is not None and "192.0.2.1/32" in after
    assert made.secret not in after and row.hint in after


@pytest.mark.parametrize(
    ("restrictions", "field"),
    [
        ({"models": []}, "models"),
        ({"models": ["x"] * 3 + [f"{n}" for n in range(200)]}, "models"),
        ({"models": [""]}, "models"),
        ({"models": ["a\n"]}, "models"),
        ({"ip_ranges": []}, "ip_ranges"),
        ({"ip_ranges": ["10.0.0.1/8"]}, "ip_ranges"),
        ({"ip_ranges": [f"10.0.{n}.0/24" for n in range(65)]}, "ip_ranges"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"requests_per_minute": 10**13}, "requests_per_minute"),
        ({"lane": "interactive"}, "lane"),
    ],
)
async def test_what_narrows_nothing_is_refused_by_name(
    db: AsyncEngine, redis: Redis, restrictions: dict[str, Any], field: str
) -> None:
    created = await make_key(db)
    for change in (
        create_in(db, created, Restrictions(**restrictions)),
        update_key(
            db, redis, created.row.id, restrictions, org_id=created.row.org_id, actor=COMMAND_LINE
        ),
    ):
        with pytest.raises(InvalidField) as refused:
            await change
        assert refused.value.param == field
    assert await row_of(db, created) == created.row


async def create_in(
    db: AsyncEngine, created: CreatedKey, restrictions: Restrictions, **owner: str
) -> CreatedKey:
    async with tenant(db, created.row.org_id) as conn:
        return await create_key(
            conn,
            org_id=created.row.org_id,
            project_id=created.row.project_id,
            name="k",
            scopes=["inference"],
            restrictions=restrictions,
            **NEW,
            **owner,
            actor=COMMAND_LINE,
        )


async def test_an_owner_must_be_there(db: AsyncEngine) -> None:
    created = await make_key(db)
    for owner, error in (
        ({"user_id": "user_none"}, NotFound),
        ({"service_account_id": "svc_acct_none"}, NotFound),
        ({"user_id": "a", "service_account_id": "b"}, InvalidField),
    ):
        with pytest.raises(error):
            await create_in(db, created, Restrictions(), **owner)


async def test_an_update_reaches_workers_and_the_log(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    org_id = created.row.org_id
    until = datetime.now(tz=UTC) + timedelta(days=1)
    async with authenticating(db, redis) as authenticator:
        assert (await authenticator.authenticate(created.secret)).allowed_models is None
        changes = {"name": "desk", "models": ["m"], "plan": "small", "expires_at": until}
        changes["lane"] = "batch"
        row = await update_key(db, redis, created.row.id, changes, org_id=org_id, actor=ALICE)
        assert row == await row_of(db, created)
        assert (row.name, row.models, row.plan, row.expires_at) == ("desk", ["m"], "small", until)
        async with within(SECOND_S):
            while (await authenticator.authenticate(created.secret)).allowed_models != {"m"}:
                await asyncio.sleep(0.005)
        assert (await authenticator.authenticate(created.secret)).key_lane == "batch"
        wider = {"models": None, "plan": None, "scopes": ["usage:read", "inference"]}
        row = await update_key(db, redis, created.row.id, wider, org_id=org_id, actor=COMMAND_LINE)
        assert (row.models, row.plan, row.scopes) == (None, None, ["inference", "usage:read"])
    same = await update_key(db, redis, created.row.id, {}, org_id=org_id, actor=COMMAND_LINE)
    assert same == row
    actions = [entry for entry in await audited(db) if entry[0] == "api_key.updated"]
    assert len(actions) == 2, "what changes nothing is not in the log"
    assert actions[0][1] == "user_alice" and '"desk"' in (actions[0][3] or "")
    assert '"laptop"' in (actions[0][2] or "")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["admin:keys"]}, "scopes"),
        ({"plan": "none"}, "plan"),
        ({"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "expires_at"),
    ],
)
async def test_an_update_that_breaks_a_rule_is_refused_by_field(
    db: AsyncEngine, redis: Redis, change: dict[str, Any], field: str
) -> None:
    created = await make_key(db)
    with pytest.raises((InvalidField, NotFound)) as refused:
        await update_key(
            db, redis, created.row.id, change, org_id=created.row.org_id, actor=COMMAND_LINE
        )
    assert refused.value.param == field


async def test_the_check_sees_the_locked_row_and_can_stop_everything(
    db: AsyncEngine, redis: Redis
) -> None:
    created = await make_key(db)
    seen = []

    class Stop(Exception):
        pass

    def check(row: KeyRow) -> None:
        seen.append(row)
        raise Stop

    of: dict[str, Any] = {"org_id": created.row.org_id, "check": check}
    for change in (
        update_key(db, redis, created.row.id, {"name": "x"}, **of, actor=COMMAND_LINE),
        rotate_key(db, redis, created.row.id, **NEW, **of, actor=COMMAND_LINE),
        revoke_key(db, redis, created.row.id, **of, actor=COMMAND_LINE),
    ):
        with pytest.raises(Stop):
            await change
    assert seen == [created.row] * 3
    assert await row_of(db, created) == created.row


async def test_a_rotated_key_has_two_secrets_and_never_three(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    of = {"org_id": created.row.org_id, **NEW}
    async with authenticating(db, redis) as here, authenticating(db, redis) as there:
        for each in (here, there):
            await each.authenticate(created.secret)
        second = await rotate_key(db, redis, created.row.id, grace_s=3600, actor=ALICE, **of)
        assert second.secret != created.secret and second.secret not in repr(second)
        assert second.row.id == created.row.id
        for each in (here, there):
            assert (await each.authenticate(second.secret)).key_hint == second.row.hint
            async with within(SECOND_S):
                while (await each.authenticate(created.secret)).expires_at is None:
                    await asyncio.sleep(0.005)
        third = await rotate_key(db, redis, created.row.id, grace_s=3600, **of, actor=COMMAND_LINE)
        for each in (here, there):
            assert await until_refused(each, created.secret) is InvalidKey
            await each.authenticate(second.secret)
            await each.authenticate(third.secret)
        fourth = await rotate_key(db, redis, created.row.id, grace_s=0, **of, actor=COMMAND_LINE)
        assert fourth.row.previous_hint is None
        for each in (here, there):
            assert await until_refused(each, second.secret) is InvalidKey
            assert await until_refused(each, third.secret) is InvalidKey
            await each.authenticate(fourth.secret)
        await revoke_key(db, redis, created.row.id, org_id=created.row.org_id, actor=COMMAND_LINE)
        assert await until_refused(here, fourth.secret) is RevokedKey
    rotations = [entry for entry in await audited(db) if entry[0] == "api_key.rotated"]
    assert len(rotations) == 3 and rotations[0][1] == "user_alice"
    secrets = [each.secret for each in (created, second, third, fourth)]
    log = str(await audited(db))
    assert not any(secret in log for secret in secrets)
    for change in (
        rotate_key(db, redis, created.row.id, **of, actor=COMMAND_LINE),
        update_key(
            db, redis, created.row.id, {"name": "x"}, org_id=created.row.org_id, actor=COMMAND_LINE
        ),
    ):
        with pytest.raises(InvalidField, match="^key: it is revoked"):
            await change


@pytest.mark.parametrize("grace_s", [-1, MAX_GRACE_S + 1])
async def test_a_grace_has_bounds(db: AsyncEngine, redis: Redis, grace_s: int) -> None:
    created = await make_key(db)
    with pytest.raises(InvalidField, match=r"^grace_s: "):
        await rotate_key(
            db,
            redis,
            created.row.id,
            org_id=created.row.org_id,
            grace_s=grace_s,
            **NEW,
            actor=COMMAND_LINE,
        )


async def test_an_expired_key_stays_as_it_is(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    async with db.begin() as conn:
        past = datetime.now(tz=UTC) - timedelta(seconds=1)
        await conn.execute(sa.update(api_keys).values(expires_at=past))
    with pytest.raises(InvalidField, match="^key: it has expired"):
        await rotate_key(
            db, redis, created.row.id, org_id=created.row.org_id, **NEW, actor=COMMAND_LINE
        )


async def test_another_tenant_changes_nothing(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    for change in (
        update_key(
            db, redis, created.row.id, {"name": "x"}, org_id="org_other", actor=COMMAND_LINE
        ),
        rotate_key(db, redis, created.row.id, org_id="org_other", **NEW, actor=COMMAND_LINE),
        revoke_key(db, redis, created.row.id, org_id="org_other", actor=COMMAND_LINE),
    ):
        with pytest.raises(NotFound):
            await change
    assert await row_of(db, created) == created.row


async def test_a_leaked_key_ends_at_once(db: AsyncEngine, redis: Redis) -> None:
    created = await make_key(db)
    reporter = Actor(kind="system", id="leak-report")
    async with authenticating(db, redis) as authenticator:
        hashes = authenticator.hashes
        await authenticator.authenticate(created.secret)
        assert not await report_leak(db, redis, hashes("sk-tg-" + "0" * 43), actor=reporter)
        await authenticator.authenticate(created.secret)
        for _ in range(2):
            assert await report_leak(db, redis, hashes(created.secret), actor=reporter)
        assert await until_refused(authenticator, created.secret) is RevokedKey
    ends = [entry for entry in await audited(db) if entry[0] == "api_key.deleted"]
    assert [entry[1] for entry in ends] == ["leak-report"] and "leak" in (ends[0][3] or "")


async def test_a_leaked_secret_that_was_rotated_away_ends_alone(
    db: AsyncEngine, redis: Redis
) -> None:
    created = await make_key(db)
    reporter = Actor(kind="system", id="leak-report")
    fresh = await rotate_key(
        db, redis, created.row.id, org_id=created.row.org_id, **NEW, actor=COMMAND_LINE
    )
    async with authenticating(db, redis) as authenticator:
        await authenticator.authenticate(created.secret)
        assert await report_leak(db, redis, authenticator.hashes(created.secret), actor=reporter)
        assert await until_refused(authenticator, created.secret) is InvalidKey
        await authenticator.authenticate(fresh.secret)
        assert not await report_leak(
            db, redis, authenticator.hashes(created.secret), actor=reporter
        )
    assert (await row_of(db, created)).previous_expires_at is None
