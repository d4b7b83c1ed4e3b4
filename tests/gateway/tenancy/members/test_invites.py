"""Invites: one link, one user, for a week; and what another tenant sees of all this."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.tenancy import projects
from gateway.tenancy.errors import (
    InvalidField,
    InviteClosed,
    NameTaken,
    NotFound,
)
from gateway.tenancy.keys import owned_keys, service_accounts
from gateway.tenancy.member_tables import ROLES
from gateway.tenancy.members import invites, members, users
from gateway.tenancy.members.invites import CreatedInvite, ProjectGrant
from gateway.tenancy.members.users import User
from tests.gateway.a_secret import a_secret
from tests.gateway.tenancy.members.tenants import ME, NOW, SECRET, Tenant


async def invite(acme: Tenant, email: str = "new@x.example", **change: object) -> CreatedInvite:
    wanted: dict[str, object] = {"role": "reader", "projects": [], "now": NOW, **change}
    async with acme() as conn:
        return await invites.create_invite(
            conn,
            org_id=acme.org_id,
            email=email,
            secret=SECRET,
            **ME,
            **wanted,  # type: ignore[arg-type]
        )


async def accept(system_db: AsyncEngine, token: str, **change: object) -> User:
    wanted: dict[str, object] = {"secret": SECRET, "name": "New", "now": NOW, **change}
    async with system_db.begin() as conn:
        return await invites.accept_invite(conn, token, **wanted)  # type: ignore[arg-type]


async def test_an_invite_becomes_a_user_once(acme: Tenant, system_db: AsyncEngine) -> None:
    grants = [ProjectGrant(id=acme.project_id, role="owner")]
    made = await invite(acme, "New@X.example", role="owner", projects=grants)
    assert made.invite.status(NOW) == "pending" and made.token not in repr(made)
    async with system_db.begin() as conn:
        seen = await invites.find_invite(conn, made.token, secret=SECRET, now=NOW)
        assert seen == made.invite
    user = await accept(
        system_db, made.token, password_hash="h", ip="127.0.0.1", request_id="req_1"
    )
    assert (user.email, user.role, user.org_id) == ("new@x.example", "owner", acme.org_id)
    async with acme() as conn:
        member = await members.get_member(conn, **acme.here, user_id=user.id)
        assert member.role == "owner"
        found = await invites.get_invite(conn, org_id=acme.org_id, invite_id=made.invite.id)
        assert found.status(NOW) == "accepted"
        stored = await conn.scalar(sa.text("SELECT token_hash FROM invites"))
        assert stored is not None and made.token not in str(stored)
        with pytest.raises(InviteClosed):
            await invites.delete_invite(conn, org_id=acme.org_id, invite_id=made.invite.id, **ME)
    with pytest.raises(NotFound, match="token"):
        await accept(system_db, made.token)
    assert (await acme.actions())[-3:] == ["invite.sent", "user.added", "invite.accepted"]


async def test_of_ten_who_accept_at_once_one_is_made(acme: Tenant, system_db: AsyncEngine) -> None:
    made = await invite(acme)
    tries = [accept(system_db, made.token) for _ in range(10)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["NotFound"] * 9 + ["User"]


async def test_an_invite_ends_by_time_by_withdrawal_and_with_its_org(
    acme: Tenant, system_db: AsyncEngine
) -> None:
    late = await invite(acme)
    assert late.invite.status(NOW + invites.LIFETIME) == "expired"
    with pytest.raises(NotFound):
        await accept(system_db, late.token, now=NOW + invites.LIFETIME)
    async with acme() as conn:
        await invites.delete_invite(conn, org_id=acme.org_id, invite_id=late.invite.id, **ME)
        assert await invites.list_invites(conn, org_id=acme.org_id) == ([], False)
        with pytest.raises(NotFound):
            await invites.delete_invite(conn, org_id=acme.org_id, invite_id=late.invite.id, **ME)
    with pytest.raises(NotFound):
        await accept(system_db, late.token)
    last = await invite(acme)
    async with system_db.begin() as conn:
        await conn.execute(sa.text("UPDATE orgs SET archived_at = now()"))
    with pytest.raises(NotFound):
        await accept(system_db, last.token)


async def test_an_address_has_one_open_invite_and_an_expired_one_makes_room(
    acme: Tenant, system_db: AsyncEngine
) -> None:
    first = await invite(acme)
    with pytest.raises(NameTaken, match="open invite"):
        await invite(acme, "NEW@x.example")
    later = NOW + invites.LIFETIME + timedelta(seconds=1)
    second = await invite(acme, now=later)
    async with system_db.connect() as conn:
        expired = sa.text("SELECT target FROM audit_entries WHERE action = 'invite.expired'")
        assert list(await conn.scalars(expired)) == [first.invite.id]
    with pytest.raises(NotFound):
        await accept(system_db, first.token, now=later)
    await accept(system_db, second.token, now=later)
    with pytest.raises(NameTaken, match="a user"):
        await invite(acme)


async def test_an_invite_names_live_projects_of_its_org_once_each(
    acme: Tenant, other: Tenant, system_db: AsyncEngine
) -> None:
    grant = ProjectGrant(id=acme.project_id, role="member")
    with pytest.raises(NotFound):
        await invite(acme, projects=[ProjectGrant(id=other.project_id, role="member")])
    with pytest.raises(InvalidField, match="twice"):
        await invite(acme, projects=[grant, grant])
    with pytest.raises(InvalidField, match="at most"):
        await invite(acme, projects=[grant] * (invites.MAX_PROJECTS + 1))
    async with acme() as conn:
        assert await invites.default_projects(conn, org_id=acme.org_id) == [grant]
    made = await invite(acme, projects=[grant])
    async with acme() as conn:
        await projects.archive(conn, **acme.here, **ME)
        assert await invites.default_projects(conn, org_id=acme.org_id) == []
    user = await accept(system_db, made.token)
    async with acme() as conn:
        assert await members.list_members(conn, **acme.here) == ([], False)
        assert (await users.get_user(conn, org_id=acme.org_id, user_id=user.id)) == user


async def test_a_link_survives_a_new_secret_of_the_installation(
    acme: Tenant, system_db: AsyncEngine
) -> None:
    made = await invite(acme)
    with pytest.raises(NotFound):
        await accept(system_db, made.token, secret=a_secret("two"))
    await accept(system_db, made.token, secret=a_secret("two", "one"))


@pytest.mark.parametrize("token", ["", "x" * 65, "ä", "x" * 43])
async def test_an_unknown_link_is_not_found(system_db: AsyncEngine, token: str) -> None:
    with pytest.raises(NotFound, match="token"):
        await accept(system_db, token)


def test_a_link_leads_to_the_login_flow() -> None:
    link = invites.to_link("https://x.example/", "t")
    assert link == "https://x.example/invites/accept?token=t"


# ---- across the wall


async def test_another_tenants_rows_are_not_there(acme: Tenant, other: Tenant) -> None:
    async with other() as conn:
        account = await service_accounts.create_service_account(conn, **other.here, name="ci", **ME)
        await members.add_member(conn, **other.here, user_id=other.owner.id, role="member", **ME)
    made = await invite(other)
    org, theirs = {"org_id": acme.org_id}, {"project_id": other.project_id}
    user = {"user_id": other.owner.id}
    account_id = {"service_account_id": account.id}
    tries: list[Callable[[AsyncConnection], Awaitable[object]]] = [
        lambda conn: users.get_user(conn, **org, **user),
        lambda conn: users.find_user(conn, **org, email=other.owner.email),
        lambda conn: users.change_role(conn, **org, **user, role="reader", **ME),
        lambda conn: users.archive_user(conn, **org, **user, **ME),
        lambda conn: users.set_password(conn, **org, **user, password_hash="h", **ME),
        lambda conn: projects.get_project(conn, **org, **theirs),
        lambda conn: projects.rename_project(conn, **org, **theirs, name="n", **ME),
        lambda conn: projects.archive(conn, **org, **theirs, **ME),
        lambda conn: members.get_member(conn, **org, **theirs, **user),
        lambda conn: members.add_member(conn, **acme.here, **user, role="member", **ME),
        lambda conn: members.add_member(
            conn, **org, **theirs, user_id=acme.owner.id, role="member", **ME
        ),
        lambda conn: members.remove_member(conn, **org, **theirs, **user, **ME),
        lambda conn: service_accounts.get_service_account(conn, **org, **theirs, **account_id),
        lambda conn: service_accounts.archive_service_account(
            conn, **org, **theirs, **account_id, **ME
        ),
        lambda conn: invites.get_invite(conn, **org, invite_id=made.invite.id),
        lambda conn: invites.delete_invite(conn, **org, invite_id=made.invite.id, **ME),
        lambda conn: invites.find_invite(conn, made.token, secret=SECRET, now=NOW),
    ]
    for attempt in tries:
        with pytest.raises(NotFound):
            async with acme() as conn:
                await attempt(conn)
    async with acme() as conn:
        assert await members.list_members(conn, **org, **theirs) == ([], False)
        assert await service_accounts.list_service_accounts(conn, **org, **theirs) == ([], False)
        assert await invites.list_invites(conn, **org) == ([], False)
        assert await users.list_users(conn, **org) == ([acme.owner], False)
        assert await owned_keys.list_project_keys(conn, **org, **theirs) == ([], False)


def test_the_roles_are_the_policys() -> None:
    assert ROLES == ("owner", "admin", "developer", "billing", "reader")
