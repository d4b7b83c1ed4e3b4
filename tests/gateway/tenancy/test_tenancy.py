"""Tenancy on a real Postgres and a real Redis: names, owners, plans, archives, the first start."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.app.create import connect_redis
from gateway.audit.log import COMMAND_LINE
from gateway.principal import UNLIMITED, Plan
from gateway.processes.bootstrap import BootstrapResult, bootstrap
from gateway.tenancy import member_tables
from gateway.tenancy.changes import CHANNEL, EVERYTHING, changing
from gateway.tenancy.errors import ChangeNotAnnounced, InvalidField, NameTaken, NotFound
from gateway.tenancy.keys.keys import (
    ADMIN_PREFIX,
    KEY_FORM,
    CreatedKey,
    KeyRow,
    create_key,
    find_named_key,
    hash_key,
    revoke_key,
    select_keys,
)
from gateway.tenancy.money.plans import sync_plans
from gateway.tenancy.orgs import Org, archive_org, create_org, select_orgs, update_org
from gateway.tenancy.pages import read_all
from gateway.tenancy.projects import (
    Project,
    archive,
    create_project,
    find_project,
    select_projects,
    update_project,
)
from gateway.tenancy.tables import api_keys, check_name, metadata, orgs, plans, projects
from tests.gateway.tenancy.found_keys import find_key

assert member_tables.users.metadata is metadata  # what api_keys refers to is declared there

PEPPER, PEPPER_ID = b"p" * 32, "pepper-1"
SMALL = Plan(name="small", tokens_per_minute=600, requests_per_minute=6, max_concurrent_streams=1)
LARGE = Plan(name="large", tokens_per_minute=1_000_000)


async def make_tenant(db: AsyncEngine) -> tuple[Org, Project, CreatedKey]:
    async with db.begin() as conn:
        await sync_plans(conn, [SMALL, LARGE])
        org = await create_org(conn, name="acme", plan="large", actor=COMMAND_LINE)
        project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        key = await create_key(
            conn,
            org_id=org.id,
            project_id=project.id,
            name="laptop",
            scopes=["usage:read", "inference", "inference"],
            plan="small",
            pepper=PEPPER,
            pepper_id=PEPPER_ID,
            actor=COMMAND_LINE,
        )
    return org, project, key


async def list_orgs(conn: AsyncConnection, *, archived: bool = False) -> list[Org]:
    return [each async for each in read_all(conn, select_orgs(archived=archived), orgs.c.id, Org)]


async def list_projects(conn: AsyncConnection, *, org_id: str) -> list[Project]:
    listed = select_projects(org_id)
    return [each async for each in read_all(conn, listed, projects.c.id, Project)]


async def list_keys(
    conn: AsyncConnection, *, org_id: str, project_id: str | None = None
) -> list[KeyRow]:
    listed = select_keys(org_id, project_id=project_id)
    return [each async for each in read_all(conn, listed, api_keys.c.id, KeyRow)]


async def archive_project(db: AsyncEngine, redis: Redis, project_id: str, *, org_id: str) -> None:
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        await archive(conn, org_id=org_id, project_id=project_id, actor=COMMAND_LINE)


async def test_the_tables_are_what_the_migration_makes(db: AsyncEngine) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(
            connection, opts={"include_name": lambda name, kind, _: name in ours or kind != "table"}
        )
        return list(compare_metadata(context, metadata))

    ours = set(metadata.tables)
    async with db.connect() as conn:
        assert await conn.run_sync(differences) == []


async def test_a_key_is_returned_once_and_only_its_hash_is_stored(db: AsyncEngine) -> None:
    org, project, created = await make_tenant(db)
    assert KEY_FORM.fullmatch(created.secret)
    assert created.secret not in repr(created) and created.row.last_four == created.secret[-4:]
    async with db.connect() as conn:
        stored = (await conn.execute(sa.select(api_keys))).one()._mapping
        assert created.secret not in str(dict(stored))
        assert stored["key_hash"] == hash_key(PEPPER, created.secret)
        record = await find_key(conn, key_hash=stored["key_hash"], pepper_id=PEPPER_ID)
        assert await find_key(conn, key_hash=stored["key_hash"], pepper_id="pepper-2") is None
        assert await list_keys(conn, org_id=org.id) == [created.row]
        assert await list_keys(conn, org_id="org_other", project_id=project.id) == []
        assert await list_keys(conn, org_id=org.id, project_id="proj_other") == []
        found = (created.row.id, org.id)
        for named in (created.row.id, created.row.id[-6:], f"key_…{created.row.id[-8:]}"):
            assert await find_named_key(conn, named) == found
        assert await find_named_key(conn, created.row.name) == found
    assert record is not None and record.row == created.row and not record.archived
    assert created.row.scopes == ["inference", "usage:read"]
    assert (created.row.org_id, created.row.project_id) == (org.id, project.id)
    assert (record.key_plan, record.project_plan, record.org_plan) == (SMALL, UNLIMITED, LARGE)
    assert created.row.hint == f"sk-tg-...{created.secret[-4:]}"


async def test_keys_do_not_repeat_and_admin_keys_are_told_apart(db: AsyncEngine) -> None:
    org, project, _ = await make_tenant(db)
    async with db.begin() as conn:
        made = [
            await create_key(
                conn,
                org_id=org.id,
                project_id=project.id,
                name="k",
                scopes=["admin:*"],
                pepper=PEPPER,
                pepper_id=PEPPER_ID,
                actor=COMMAND_LINE,
            )
            for _ in range(50)
        ]
    assert len({key.secret for key in made}) == 50
    assert all(key.secret.startswith(ADMIN_PREFIX) for key in made)
    assert all(KEY_FORM.fullmatch(key.secret) for key in made)
    ids = [key.row.id for key in made]
    assert len(set(ids)) == 50 and all(key_id.startswith("key_") for key_id in ids)


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "a\x00b", "\u202egpj", "x" * 101])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidField, match="^name: "):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "Team 7 – Zürich", "日本", "x" * 100])
def test_good_names_stay_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["everything"]}, "scopes"),
        ({"scopes": ["admin:*x"]}, "scopes"),
        ({"scopes": [f"admin:{'a' * n}" for n in range(1, 34)]}, "scopes"),
        ({"name": ""}, "name"),
        ({"plan": "none"}, "plan"),
        ({"project_id": "proj_none"}, "project"),
        ({"expires_at": datetime.now(tz=UTC) - timedelta(seconds=1)}, "expires_at"),
        ({"expires_at": datetime(2999, 1, 1)}, "expires_at"),
    ],
)
async def test_a_key_that_breaks_a_rule_is_refused_by_field(
    db: AsyncEngine, change: dict[str, object], field: str
) -> None:
    org, project, _ = await make_tenant(db)
    good: dict[str, object] = {"org_id": org.id, "project_id": project.id}
    good |= {"name": "k", "scopes": ["inference"]}
    with pytest.raises((InvalidField, NotFound)) as refused:
        async with db.begin() as conn:
            await create_key(
                conn, **(good | change), pepper=PEPPER, pepper_id=PEPPER_ID, actor=COMMAND_LINE
            )  # type: ignore[arg-type]
    assert refused.value.param == field


async def test_names_are_unique_among_the_living(db: AsyncEngine, redis: Redis) -> None:
    org, project, _ = await make_tenant(db)
    async with db.begin() as conn:
        with pytest.raises(NameTaken):
            await create_org(conn, name="acme", actor=COMMAND_LINE)
        with pytest.raises(NameTaken):
            await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        with pytest.raises(NotFound):
            await create_project(conn, org_id="org_none", name="web", actor=COMMAND_LINE)
        assert await find_project(conn, org_id=org.id, name="web") == project
        assert [p.id for p in await list_projects(conn, org_id=org.id)] == [project.id]
        assert [o.id for o in await list_orgs(conn)] == [org.id]
    await archive_project(db, redis, project.id, org_id=org.id)
    await archive_project(db, redis, project.id, org_id=org.id)
    async with db.begin() as conn:
        with pytest.raises(NotFound):
            await find_project(conn, org_id=org.id, name="web")
        again = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        assert again.id != project.id
        assert [p.id for p in await list_projects(conn, org_id=org.id)] == [again.id]
    await archive_org(db, redis, org.id, actor=COMMAND_LINE)
    async with db.begin() as conn:
        assert await list_orgs(conn) == []
        assert [o.id for o in await list_orgs(conn, archived=True)] == [org.id]
        assert (await create_org(conn, name="acme", actor=COMMAND_LINE)).id != org.id
        with pytest.raises(NotFound):
            await create_project(conn, org_id=org.id, name="late", actor=COMMAND_LINE)


@pytest.mark.parametrize("owner", ["org", "project"])
async def test_an_archived_owner_archives_its_keys(
    db: AsyncEngine, redis: Redis, owner: str
) -> None:
    org, project, created = await make_tenant(db)
    if owner == "org":
        await archive_org(db, redis, org.id, actor=COMMAND_LINE)
    else:
        await archive_project(db, redis, project.id, org_id=org.id)
    async with db.begin() as conn:
        key_hash = hash_key(PEPPER, created.secret)
        record = await find_key(conn, key_hash=key_hash, pepper_id=PEPPER_ID)
        assert record is not None and record.archived


async def test_an_archived_project_gets_no_new_keys(db: AsyncEngine, redis: Redis) -> None:
    org, project, _ = await make_tenant(db)
    await archive_project(db, redis, project.id, org_id=org.id)
    with pytest.raises(NotFound, match="^project: "):
        async with db.begin() as conn:
            await create_key(
                conn,
                org_id=org.id,
                project_id=project.id,
                name="late",
                scopes=["inference"],
                pepper=PEPPER,
                pepper_id=PEPPER_ID,
                actor=COMMAND_LINE,
            )


async def test_plans_follow_the_settings(db: AsyncEngine, redis: Redis) -> None:
    org, project, created = await make_tenant(db)
    key_hash = hash_key(PEPPER, created.secret)
    bigger = Plan(name="small", tokens_per_minute=1200)
    async with db.begin() as conn:
        await sync_plans(conn, [bigger])
        record = await find_key(conn, key_hash=key_hash, pepper_id=PEPPER_ID)
        assert record is not None and record.key_plan == bigger
        assert record.org_plan == LARGE, "a plan that left the settings goes on to bind"
        with pytest.raises(NotFound, match=r"^plan: "):
            await create_org(conn, name="late", plan="large", actor=COMMAND_LINE)
    with pytest.raises(NotFound, match=r"^plan: "):
        await update_org(db, redis, org.id, {"plan": "large"}, actor=COMMAND_LINE)
    await update_org(db, redis, org.id, {"plan": "small"}, actor=COMMAND_LINE)
    await update_project(
        db, redis, project.id, {"plan": "small"}, org_id=org.id, actor=COMMAND_LINE
    )
    async with db.begin() as conn:
        record = await find_key(conn, key_hash=key_hash, pepper_id=PEPPER_ID)
        assert record is not None and record.org_plan == record.project_plan == bigger
        await sync_plans(conn, [SMALL, LARGE])
        live = sa.select(plans.c.name).where(plans.c.archived_at.is_(None))
        assert set(await conn.scalars(live)) == {"small", "large"}


@pytest.mark.parametrize("limit", [-1, 10**13])
async def test_a_limit_out_of_range_is_refused_by_name(db: AsyncEngine, limit: int) -> None:
    with pytest.raises(InvalidField, match=r"^plan\.odd\.requests_per_minute: "):
        async with db.begin() as conn:
            await sync_plans(conn, [Plan(name="odd", requests_per_minute=limit)])


async def test_verbs_name_what_they_cannot_find(db: AsyncEngine, redis: Redis) -> None:
    org, _, created = await make_tenant(db)
    async with db.connect() as conn:
        for named in ("key_none", "", "%", "_" * 8, created.row.id[-5:]):
            with pytest.raises(NotFound, match=r"^key: no key "):
                await find_named_key(conn, named)
        again = created.row.id[:-7] + ("1" if created.row.id[-7] == "0" else "0")
        await conn.execute(
            sa.insert(api_keys).values(
                {**(await conn.execute(sa.select(api_keys))).one()._mapping}
                | {"id": again + created.row.id[-6:], "key_hash": "1"}
            )
        )
        with pytest.raises(NotFound, match=r"^key: several keys end with "):
            await find_named_key(conn, created.row.id[-6:])
        assert await find_named_key(conn, created.row.id) == (created.row.id, org.id)
    for call, field in [
        (revoke_key(db, redis, "key_none", org_id=org.id, actor=COMMAND_LINE), "key"),
        (archive_org(db, redis, "org_none", actor=COMMAND_LINE), "org"),
        (archive_project(db, redis, "proj_none", org_id=org.id), "project"),
        (update_org(db, redis, "org_none", {"plan": None}, actor=COMMAND_LINE), "org"),
        (
            update_project(
                db, redis, "proj_none", {"plan": None}, org_id=org.id, actor=COMMAND_LINE
            ),
            "project",
        ),
    ]:
        with pytest.raises(NotFound) as missing:
            await call
        assert missing.value.param == field


async def test_revoking_is_announced_after_the_commit_and_repeats(
    db: AsyncEngine, redis: Redis
) -> None:
    org, _, created = await make_tenant(db)
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(CHANNEL)
        heard = []
        for _ in range(2):
            await revoke_key(db, redis, created.row.id, org_id=org.id, actor=COMMAND_LINE)
            async with asyncio.timeout(30):
                while (message := await pubsub.get_message(timeout=1)) is None or message[
                    "type"
                ] != "message":
                    continue
            heard.append(message["data"])
            async with db.connect() as conn:
                [row] = await list_keys(conn, org_id=org.id)
            heard.append(row.revoked_at)
    assert heard[0] == heard[2] == created.row.id.encode()
    assert heard[1] == heard[3] is not None, "the first revocation's time stands"


async def test_a_revocation_without_redis_stands_and_says_that_nobody_was_told(
    db: AsyncEngine,
) -> None:
    org, _, created = await make_tenant(db)
    nowhere = connect_redis("redis://127.0.0.1:1")
    with pytest.raises(ChangeNotAnnounced) as said:
        await revoke_key(db, nowhere, created.row.id, org_id=org.id, actor=COMMAND_LINE)
    assert isinstance(said.value.__cause__, RedisConnectionError | TimeoutError)
    await nowhere.aclose()
    async with db.connect() as conn:
        [row] = await list_keys(conn, org_id=org.id)
    assert row.revoked_at is not None


async def test_of_many_first_starts_one_makes_the_keys(db: AsyncEngine) -> None:
    async def start() -> BootstrapResult:
        return await bootstrap(
            db, pepper=PEPPER, pepper_id=PEPPER_ID, plans=[SMALL, LARGE], default_plan="large"
        )

    results = await asyncio.gather(*(start() for _ in range(4)))
    [first] = [result for result in results if result.api_key is not None]
    assert results.count(BootstrapResult()) == 3
    assert first.admin_key is not None and first.admin_key.startswith(ADMIN_PREFIX)
    assert first.api_key is not None and first.api_key not in repr(first)
    async with db.connect() as conn:
        [org] = await list_orgs(conn)
        [project] = await list_projects(conn, org_id=org.id)
        api_key, admin_key = await list_keys(conn, org_id=org.id)
    assert (org.name, project.name, org.is_operator) == ("default", "default", True)
    assert (api_key.scopes, api_key.plan) == (["inference", "mcp:call"], "large")
    assert (admin_key.scopes, admin_key.plan) == (["admin:*", "usage:read"], None)
    assert await start() == BootstrapResult()


async def test_a_first_start_that_fails_leaves_nothing(db: AsyncEngine) -> None:
    with pytest.raises(NotFound):
        await bootstrap(
            db, pepper=PEPPER, pepper_id=PEPPER_ID, plans=[SMALL], default_plan="missing"
        )
    async with db.connect() as conn:
        assert await list_orgs(conn) == []
