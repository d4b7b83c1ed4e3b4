"""GET /v1/organization/audit_logs through the official SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from openai.types.admin.organization.audit_log_list_response import AuditLogListResponse
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor, record
from gateway.audit.tables import entries
from gateway.ids import uuid7
from gateway.tenancy.member_tables import users
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.gateway.routes.admin.conftest import World
from tests.shared_application import on_one_loop

ALICE = "user_alice"
BY_ALICE = Actor(kind="user", id=ALICE, ip="192.0.2.1", request_id="req_a")
BY_KEY = Actor(kind="api_key", id="key_1", ip="2001:db8::1", on_behalf_of=ALICE)
BY_SERVICE = Actor(kind="api_key", id="key_2", on_behalf_of="svc_acct_1")
BY_CLIENT = Actor(kind="client", id="client_1", on_behalf_of=ALICE)
BY_NOBODY = Actor(kind="api_key", id="key_3")
BY_ACCOUNT = Actor(kind="service_account", id="svc_acct_2")
BY_SYSTEM = Actor(kind="system", id="cli")


class Log:
    """Entries of an org of its own, and a key that may read them."""

    def __init__(self, world: World, org_id: str, project_id: str, first: int) -> None:
        self.world, self.org_id, self.project_id, self.first = world, org_id, project_id, first

    async def add(self, action: str, target: str, actor: Actor = BY_ALICE, **more: Any) -> None:
        async with self.world.db.begin() as conn:
            await record(
                conn, org_id=self.org_id, actor=actor, action=action, target=target, **more
            )

    async def read(self, **query: Any) -> list[AuditLogListResponse]:
        """One page, of what this test has added."""
        page = await self.world.sdk.admin.organization.audit_logs.list(**query)
        return [each for each in page.data if extra(each)["sequence"] > self.first]

    async def targets(self, **query: Any) -> list[str]:
        return [extra(each)["target"] for each in await self.read(**query)]


def extra(event: AuditLogListResponse) -> dict[str, Any]:
    found: dict[str, Any] = event.model_extra["tollgate"]  # type: ignore[index]
    return found


@on_one_loop()
async def log(world: World, org_id: str) -> AsyncIterator[Log]:
    async with world.db.begin() as conn:
        project = await create_project(conn, org_id=org_id, name="shop", actor=COMMAND_LINE)
        person = {"id": ALICE, "org_id": org_id, "email": "Alice@acme.example", "name": "Alice"}
        await conn.execute(sa.insert(users).values(**person, role="owner"))
        heads = sa.text("SELECT max(sequence) FROM audit_heads WHERE org_id = :org_id")
        first = await conn.scalar(heads, {"org_id": org_id})
    yield Log(world, org_id, project.id, first)
    async with world.db.begin() as conn:
        await conn.execute(sa.delete(users).where(users.c.id == ALICE))


async def test_an_event_is_of_openais_shape(log: Log) -> None:
    await log.add("project.created", log.project_id, after={"name": "shop"})
    await log.add("user.updated", ALICE, BY_KEY, before={"role": "reader"}, after={"role": "owner"})
    await log.add("api_key.deleted", "key_9", BY_SYSTEM, after={"project_id": log.project_id})
    await log.add("login.failed", ALICE, BY_ALICE, after={"error_code": "bad_password"})
    await log.add("oauth_client.created", "client_9", BY_CLIENT, after={"name": "app"})
    client, login, deleted, updated, created = await log.read()
    assert created.object == "organization.audit_log" if hasattr(created, "object") else True
    assert created.type == "project.created" and created.id.startswith("audit_log-")
    assert abs(created.effective_at - datetime.now(tz=UTC).timestamp()) < 60
    assert created.project is not None
    assert (created.project.id, created.project.name) == (log.project_id, "shop")
    assert created.project_created is not None and created.project_created.data is not None
    assert created.project_created.id == log.project_id
    assert (created.project_created.data.name, created.project_created.data.title) == (
        "shop",
        "shop",
    )
    assert updated.user_updated is not None and updated.user_updated.changes_requested is not None
    assert updated.user_updated.changes_requested.role == "owner"
    assert extra(updated)["before"] == {"role": "reader"}
    assert deleted.api_key_deleted is not None and deleted.api_key_deleted.id == "key_9"
    assert deleted.project is not None and deleted.project.id == log.project_id
    assert login.login_failed is not None and login.login_failed.error_code == "bad_password"
    assert login.project is None
    assert client.type == "oauth_client.created"  # type: ignore[comparison-overlap]
    assert client.model_extra is not None
    assert client.model_extra["oauth_client.created"]["id"] == "client_9"
    for event in (created, updated, deleted, login):
        AuditLogListResponse.model_validate(event.model_dump(by_alias=True), strict=True)


async def test_an_actor_is_a_session_or_a_key(log: Log) -> None:
    actors = (BY_ALICE, BY_KEY, BY_SERVICE, BY_CLIENT, BY_NOBODY, BY_ACCOUNT, BY_SYSTEM)
    for number, actor in enumerate(actors):
        await log.add("user.updated", f"user_{number}", actor)
    found = {}
    for event in await log.read():
        assert event.actor is not None
        found[extra(event)["actor"]["id"]] = event.actor
    user = {"id": ALICE, "email": "Alice@acme.example"}
    session = found[ALICE].session
    assert found[ALICE].type == "session" and session is not None and session.user is not None
    assert session.ip_address == "192.0.2.1" and session.user.model_dump() == user
    for actor_id in ("key_1", "client_1"):
        key = found[actor_id].api_key
        assert found[actor_id].type == "api_key" and key is not None and key.user is not None
        assert (key.id, key.type, key.user.model_dump()) == (actor_id, "user", user)
    for actor_id, account in (("key_2", "svc_acct_1"), ("svc_acct_2", "svc_acct_2")):
        key = found[actor_id].api_key
        assert key is not None and key.type == "service_account"
        assert key.service_account is not None and key.service_account.id == account
    alone = found["key_3"].api_key
    assert alone is not None and (alone.user, alone.service_account) == (None, None)
    system = found["cli"].session
    assert system is not None and system.user is None


async def test_pages_are_walked_from_the_newest(log: Log) -> None:
    for number in range(7):
        await log.add("user.updated", f"user_{number}")
    events = [
        event
        async for event in log.world.sdk.admin.organization.audit_logs.list(limit=3)
        if extra(event)["sequence"] > log.first
    ]
    assert [extra(each)["target"] for each in events] == [f"user_{n}" for n in range(6, -1, -1)]
    ids = [each.id for each in events]
    assert await log.targets(after=ids[1], limit=2) == ["user_4", "user_3"]
    assert await log.targets(before=ids[4], limit=2) == ["user_4", "user_3"]
    assert await log.targets(before=ids[1]) == ["user_6"]
    assert await log.targets(before=ids[0]) == []
    assert await log.targets(after=ids[0], before=ids[3]) == ["user_5", "user_4"]
    first = await log.world.sdk.admin.organization.audit_logs.list(limit=2)
    assert (first.has_more, first.last_id) == (True, ids[1])


async def test_filters(log: Log) -> None:
    await log.add("user.added", "user_1", BY_ALICE)
    await log.add("project.updated", log.project_id, BY_KEY)
    await log.add("user.updated", "user_2", BY_SERVICE)
    await log.add("user.added", "user_3", BY_NOBODY, project_id="proj_other")
    every = ["user_3", "user_2", log.project_id, "user_1"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"event_types": ["user.added"]}, ["user_3", "user_1"]),
        ({"event_types": ["user.added", "user.updated"]}, ["user_3", "user_2", "user_1"]),
        ({"actor_ids": [ALICE]}, [log.project_id, "user_1"]),
        ({"actor_ids": ["key_1"]}, [log.project_id]),
        ({"actor_ids": ["svc_acct_1", "key_3"]}, ["user_3", "user_2"]),
        ({"actor_emails": ["alice@ACME.example"]}, [log.project_id, "user_1"]),
        ({"actor_emails": ["bob@acme.example"]}, []),
        ({"project_ids": [log.project_id, "proj_other"]}, ["user_3", log.project_id]),
        ({"resource_ids": ["user_2"]}, ["user_2"]),
        ({"resource_ids": ["user_2"], "event_types": ["user.added"]}, []),
        ({"tenant_only": True}, []),
        ({"tenant_only": False}, every),
        ({"effective_at": {"gt": 2**40}}, []),
        ({"effective_at": {"lt": 2**40}}, every),
    ]
    for query, expected in cases:
        assert await log.targets(**query) == expected, query


@pytest.mark.parametrize("bound", ["gt", "gte", "lt", "lte"])
async def test_effective_at_is_compared_in_whole_seconds(log: Log, bound: str) -> None:
    for number in range(3):
        await log.add("user.added", f"user_{number}")
    base = datetime(2030, 1, 1, tzinfo=UTC)
    async with log.world.db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        for number, late in ((0, -0.5), (1, 0.5), (2, 1.5)):
            moved = sa.update(entries).where(entries.c.target == f"user_{number}")
            await conn.execute(moved.values(occurred_at=base + timedelta(seconds=late)))
    expected = {
        "gt": ["user_2"],
        "gte": ["user_2", "user_1"],
        "lt": ["user_0"],
        "lte": ["user_1", "user_0"],
    }[bound]
    query: Any = {bound: int(base.timestamp())}
    assert await log.targets(effective_at=query, event_types=["user.added"]) == expected


async def test_an_org_reads_its_own_log(log: Log, db: AsyncEngine) -> None:
    await log.add("user.added", "user_1")
    async with db.begin() as conn:
        other = await create_org(conn, name="other", actor=COMMAND_LINE)
        await record(
            conn, org_id=other.id, actor=BY_ALICE, action="user.added", target="user_theirs"
        )
        theirs = await conn.scalar(sa.select(entries.c.id).where(entries.c.org_id == other.id))
    assert await log.targets() == ["user_1"]
    assert await log.targets(resource_ids=["user_theirs"]) == []
    with pytest.raises(openai.BadRequestError) as refused:
        await log.read(after=theirs)
    assert refused.value.param == "after"


BAD_QUERIES: list[Any] = [
    ({"limit": 0}, "limit"),
    ({"limit": 101}, "limit"),
    ({"before": f"audit_log-{uuid7().hex}"}, "before"),
    ({"extra_query": {"color": "red"}}, "color"),
    ({"effective_at": {"gt": -1}}, "effective_at[gt]"),
    ({"effective_at": {"ne": 1}}, "effective_at[ne]"),
]


async def test_a_bad_query_is_refused_by_name(log: Log, subtests: pytest.Subtests) -> None:
    for query, param in BAD_QUERIES:
        with subtests.test(query=query, param=param):
            with pytest.raises(openai.BadRequestError) as refused:
                await log.read(**query)
            assert refused.value.param == param


async def test_who_may_not_read_it_does_not(world: World) -> None:
    refused = await world.call("GET", "/v1/organization/audit_logs", key=world.api_key)
    assert refused.status_code == 403
