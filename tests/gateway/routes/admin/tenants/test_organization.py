"""/v1/organization/...: every call that the official SDK's admin client has for projects, users,
invites, service accounts, keys and rate limits, against the whole application."""

from __future__ import annotations

import asyncio
import re
from itertools import count
from typing import Any

import openai
import pytest

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.db import tenant
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members import users
from gateway.tenancy.members.invites import accept_invite
from gateway.tenancy.members.users import User
from tests.gateway.routes.admin.conftest import World
from tests.gateway.routes.admin.exactly import exact
from tests.pace import within

ACTOR = Actor(kind="system", id="test")


async def add_user(world: World, org_id: str, email: str, role: str = "developer") -> User:
    async with tenant(world.services.db, org_id) as conn:
        return await users.create_user(
            conn, org_id=org_id, email=email, name="Ann", role=role, actor=ACTOR
        )


async def key_of(world: World, org_id: str, user: User, *scopes: str) -> str:
    pepper_id, pepper = world.services.authenticator.pepper
    async with tenant(world.services.db, org_id) as conn:
        made = await create_key(
            conn,
            org_id=org_id,
            project_id=None,
            user_id=user.id,
            name="theirs",
            scopes=scopes or ("admin:*",),
            pepper=pepper,
            pepper_id=pepper_id,
            actor=COMMAND_LINE,
        )
    return made.secret


async def test_projects(world: World) -> None:
    calls = world.sdk.admin.organization.projects
    made = await calls.create(name="one")
    exact(made)
    assert (made.name, made.status, made.archived_at) == ("one", "active", None)
    assert await calls.retrieve(made.id) == made
    renamed = await calls.update(made.id, name="uno")
    exact(renamed)
    assert renamed.name == "uno"
    with pytest.raises(openai.ConflictError, match="has a project 'default'"):
        await calls.update(made.id, name="default")
    gone = await calls.archive(made.id)
    exact(gone)
    assert gone.status == "archived" and gone.archived_at
    assert await calls.archive(made.id) == gone
    with pytest.raises(openai.ConflictError, match="is archived"):
        await calls.update(made.id, name="x")
    names = [each.name async for each in calls.list(limit=1)]
    assert names == ["default"]
    page = await calls.list(include_archived=True)
    assert [each.name for each in page.data] == ["default", "uno"]
    raw = (await world.call("GET", "/v1/organization/projects")).json()
    assert set(raw) == {"object", "data", "first_id", "last_id", "has_more"}
    assert raw["first_id"] == raw["last_id"] == raw["data"][0]["id"]


async def test_a_listing_goes_through_all_pages(world: World) -> None:
    calls = world.sdk.admin.organization.projects
    made = [await calls.create(name=f"p{n}") for n in range(5)]
    found = [each async for each in calls.list(limit=2)]
    assert found[1:] == made
    first = await calls.list(limit=2, after=made[1].id)
    assert first.data == made[2:4] and first.has_more
    assert (await calls.list(after=made[-1].id)).data == []


async def test_project_users(world: World, org_id: str, project_id: str) -> None:
    ann = await add_user(world, org_id, "ann@x.example")
    calls = world.sdk.admin.organization.projects.users
    made = await calls.create(project_id, role="member", user_id=ann.id)
    exact(made)
    assert (made.id, made.email, made.role) == (ann.id, "ann@x.example", "member")
    assert await calls.retrieve(ann.id, project_id=project_id) == made
    changed = await calls.update(ann.id, project_id=project_id, role="owner")
    exact(changed)
    assert changed.role == "owner"
    assert (await calls.list(project_id)).data == [changed]
    with pytest.raises(openai.ConflictError):
        await calls.create(project_id, role="member", email="ANN@x.example")
    removed = await calls.delete(ann.id, project_id=project_id)
    exact(removed)
    assert removed.deleted and removed.object == "organization.project.user.deleted"
    with pytest.raises(openai.NotFoundError):
        await calls.retrieve(ann.id, project_id=project_id)
    assert (await calls.create(project_id, role="member", email="ann@x.example")).id == ann.id


async def test_users(world: World, org_id: str, project_id: str) -> None:
    owner = await add_user(world, org_id, "owner@x.example", "owner")
    ann = await add_user(world, org_id, "ann@x.example")
    organization = world.sdk.admin.organization
    await organization.projects.users.create(project_id, role="owner", user_id=ann.id)
    found = await organization.users.retrieve(ann.id)
    exact(found)
    assert found.role == "developer" and found.projects is not None
    assert [(each.id, each.role) for each in found.projects.data] == [(project_id, "owner")]
    assert [each.id async for each in organization.users.list(limit=1)] == [owner.id, ann.id]
    assert (await organization.users.list(emails=["Ann@x.example"])).data == [found]
    changed = await organization.users.update(ann.id, role="reader")
    exact(changed)
    assert changed.role == "reader"
    with pytest.raises(openai.BadRequestError, match="role"):
        await organization.users.update(ann.id, role="god")
    with pytest.raises(openai.BadRequestError, match="role_id"):
        await organization.users.update(ann.id, role_id="role_1")
    with pytest.raises(openai.ConflictError, match="no owner left"):
        await organization.users.update(owner.id, role="admin")
    with pytest.raises(openai.ConflictError, match="no owner left"):
        await organization.users.delete(owner.id)
    gone = await organization.users.delete(ann.id)
    exact(gone)
    with pytest.raises(openai.NotFoundError):
        await organization.users.retrieve(ann.id)


async def test_two_owners_who_demote_each_other_leave_one(world: World, org_id: str) -> None:
    both = [await add_user(world, org_id, f"o{n}@x.example", "owner") for n in range(2)]
    calls = world.sdk.admin.organization.users
    outcomes = await asyncio.gather(
        *(calls.update(each.id, role="reader") for each in both), return_exceptions=True
    )
    kinds = sorted(type(each).__name__ for each in outcomes)
    assert kinds == ["ConflictError", "OrganizationUser"]
    assert [each.role async for each in calls.list()].count("owner") == 1


async def test_invites(world: World, org_id: str, project_id: str) -> None:
    calls = world.sdk.admin.organization.invites
    raw = await calls.with_raw_response.create(
        email="New@x.example", role="owner", projects=[{"id": project_id, "role": "member"}]
    )
    made = raw.parse()
    exact(made)
    assert (made.email, made.status, made.accepted_at) == ("new@x.example", "pending", None)
    assert raw.headers["cache-control"] == "no-store"
    link = re.fullmatch(r"http.*/invites/accept\?token=(.+)", raw.headers["x-tollgate-invite-link"])
    assert link is not None and link[1] not in raw.text
    assert await calls.retrieve(made.id) == made
    assert (await calls.list()).data == [made]
    async with world.services.system_db.begin() as conn:
        secret = world.services.authorization.secret
        user = await accept_invite(conn, link[1], secret=secret, name="New")
    accepted = await calls.retrieve(made.id)
    exact(accepted)
    assert accepted.status == "accepted" and accepted.accepted_at
    assert (await world.sdk.admin.organization.users.retrieve(user.id)).role == "owner"
    with pytest.raises(openai.ConflictError, match="accepted"):
        await calls.delete(made.id)
    default = await calls.create(email="b@x.example", role="reader")
    first = (await world.sdk.admin.organization.projects.list()).data[0]
    assert [each.id for each in default.projects] == [first.id]
    withdrawn = await calls.delete(default.id)
    exact(withdrawn)
    with pytest.raises(openai.NotFoundError):
        await calls.retrieve(default.id)


async def test_a_repeated_invite_answers_the_same_with_its_link(world: World) -> None:
    body = {"email": "a@x.example", "role": "reader", "projects": []}
    first, again = [
        await world.call("POST", "/v1/organization/invites", body, idempotency_key="k1")
        for _ in range(2)
    ]
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    link = "x-tollgate-invite-link"
    assert first.headers[link] == again.headers[link]


async def test_service_accounts_and_their_keys(world: World, project_id: str) -> None:
    calls = world.sdk.admin.organization.projects.service_accounts
    made = await calls.create(project_id, name="ci", expires_in_seconds=3600)
    exact(made)
    assert made.role == "member" and made.api_key is not None and made.api_key.expires_at
    principal = await world.services.authenticator.authenticate(made.api_key.value)
    assert (principal.service_account_id, principal.role) == (made.id, "developer")
    assert (principal.project_id, principal.scopes) == (project_id, frozenset({"inference"}))
    second = await calls.api_keys.create(
        made.id, project_id=project_id, name="two", scopes=["inference", "usage:read"]
    )
    exact(second)
    with pytest.raises(openai.BadRequestError, match="admin_api_keys"):
        await calls.api_keys.create(made.id, project_id=project_id, scopes=["admin:*"])
    alone = await calls.create(project_id, name="idle", create_service_account_only=True)
    exact(alone)
    assert alone.role == "none" and alone.api_key is None
    changed = await calls.update(alone.id, project_id=project_id, role="owner", name="busy")
    exact(changed)
    assert (changed.name, changed.role) == ("busy", "owner")
    found = [each async for each in calls.list(project_id, limit=1)]
    assert [each.id for each in found] == [made.id, alone.id]
    exact(await calls.retrieve(made.id, project_id=project_id))
    gone = await calls.delete(made.id, project_id=project_id)
    exact(gone)
    for key in (made.api_key.value, second.value):
        await refused_within_a_second(world, key)
    with pytest.raises(openai.NotFoundError):
        await calls.retrieve(made.id, project_id=project_id)


async def refused_within_a_second(world: World, key: str) -> None:
    async with within(1.0):
        while (await world.call("GET", "/v1/models", key=key)).status_code != 401:
            await asyncio.sleep(0.02)


async def test_project_keys(world: World, org_id: str, project_id: str) -> None:
    projects = world.sdk.admin.organization.projects
    made = await projects.service_accounts.create(project_id, name="ci")
    assert made.api_key is not None
    [key] = (await projects.api_keys.list(project_id)).data
    exact(key)
    assert key.id == made.api_key.id and key.owner_project_access == "active"
    assert key.owner.type == "service_account" and key.owner.service_account is not None
    assert key.owner.service_account.id == made.id
    assert made.api_key.value[-4:] in key.redacted_value
    assert await projects.api_keys.retrieve(key.id, project_id=project_id) == key
    changed = await projects.api_keys.update(
        key.id, project_id=project_id, expires_in_seconds=60, scopes=["usage:read"]
    )
    exact(changed)
    assert changed.expires_at
    with pytest.raises(openai.BadRequestError, match="scopes"):
        await projects.api_keys.update(key.id, project_id=project_id, scopes=[])
    with pytest.raises(openai.NotFoundError):
        await projects.api_keys.retrieve(key.id, project_id="proj_other")
    idle = await projects.service_accounts.create(
        project_id, name="idle", create_service_account_only=True
    )
    off = await projects.service_accounts.api_keys.create(idle.id, project_id=project_id)
    inactive = await projects.api_keys.list(project_id, owner_project_access="inactive")
    assert [each.id for each in inactive.data] == [off.id]
    await refused_within_a_second(world, off.value)
    deleted = await projects.api_keys.delete(key.id, project_id=project_id)
    exact(deleted)
    await refused_within_a_second(world, made.api_key.value)
    with pytest.raises(openai.NotFoundError):
        await projects.api_keys.delete(key.id, project_id=project_id)


async def test_admin_keys(world: World) -> None:
    calls = world.sdk.admin.organization.admin_api_keys
    [first] = (await calls.list()).data
    exact(first)
    made = await calls.create(name="ops", expires_in_seconds=3600)
    exact(made)
    theirs = world.sdk_of(made.value)
    found = await theirs.admin.organization.admin_api_keys.retrieve(made.id)
    exact(found)
    assert made.value[-4:] in found.redacted_value and found.expires_at
    order = [each.id async for each in calls.list(limit=1, order="desc")]
    assert order == [made.id, first.id]
    await world.sdk.admin.organization.projects.archive(
        (await world.sdk.admin.organization.projects.list()).data[0].id
    )
    exact(await calls.delete(made.id))  # no project's end locked the org out
    await until_raises(
        openai.AuthenticationError, lambda n: theirs.admin.organization.projects.list()
    )


async def test_nobody_gives_more_than_they_have(world: World, org_id: str) -> None:
    await add_user(world, org_id, "owner@x.example", "owner")
    admin = await add_user(world, org_id, "admin@x.example", "admin")
    ann = await add_user(world, org_id, "ann@x.example")
    theirs = world.sdk_of(await key_of(world, org_id, admin)).admin.organization
    assert (await theirs.users.update(ann.id, role="reader")).role == "reader"
    owner = (await theirs.users.list(emails=["owner@x.example"])).data[0]
    for attempt in (
        lambda: theirs.users.update(ann.id, role="owner"),
        lambda: theirs.users.update(owner.id, role="reader"),
        lambda: theirs.users.delete(owner.id),
        lambda: theirs.invites.create(email="new@x.example", role="owner"),
        lambda: theirs.admin_api_keys.create(name="more"),
    ):
        with pytest.raises(openai.PermissionDeniedError):
            await attempt()


async def test_a_demotion_takes_power_from_credentials_within_a_second(
    world: World, org_id: str
) -> None:
    await add_user(world, org_id, "owner@x.example", "owner")
    ann = await add_user(world, org_id, "ann@x.example", "owner")
    theirs = world.sdk_of(await key_of(world, org_id, ann)).admin.organization
    await theirs.projects.create(name="theirs")
    await world.sdk.admin.organization.users.update(ann.id, role="reader")
    await until_raises(openai.PermissionDeniedError, lambda n: theirs.projects.create(name=f"x{n}"))
    assert (await theirs.projects.list()).data
    await world.sdk.admin.organization.users.delete(ann.id)
    await until_raises(openai.AuthenticationError, lambda n: theirs.projects.list())


async def until_raises(kind: type[Exception], attempt: Any) -> None:
    async with within(1.0):
        for number in count():
            try:
                await attempt(number)
            except kind:
                return
            await asyncio.sleep(0.02)


async def test_of_two_who_saw_the_same_state_one_changes_it(world: World, project_id: str) -> None:
    place = f"/v1/organization/projects/{project_id}"
    tag = (await world.call("GET", place)).headers["etag"]
    first = await world.call("POST", place, {"name": "a"}, if_match=tag)
    second = await world.call("POST", place, {"name": "b"}, if_match=tag)
    assert (first.status_code, second.status_code) == (200, 412)
    assert first.headers["etag"] == (await world.call("GET", place)).headers["etag"]


async def test_every_change_stands_in_the_audit_log(
    world: World, org_id: str, project_id: str
) -> None:
    organization = world.sdk.admin.organization
    account = await organization.projects.service_accounts.create(project_id, name="ci")
    await organization.projects.rate_limits.update_rate_limit(
        "rl-far", project_id=project_id, max_tokens_per_1_minute=5
    )
    await organization.projects.service_accounts.delete(account.id, project_id=project_id)
    await organization.projects.archive(project_id)
    found = (await world.call("GET", "/v1/organization/audit_logs?limit=100")).json()["data"]
    kinds = [each["type"] for each in reversed(found)]
    wanted = ["project.created", "service_account.created", "api_key.created"]
    wanted += ["rate_limit.updated", "api_key.deleted", "service_account.deleted"]
    assert kinds[-7:] == [*wanted, "project.archived"]
