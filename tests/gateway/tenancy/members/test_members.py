"""Users and their roles, projects' members and service accounts belong to an org. The tests run on
a real Postgres, as the tenants' role; races are run, not imagined."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import COMMAND_LINE
from gateway.principal import SCOPE_INFERENCE
from gateway.tenancy import projects, tables
from gateway.tenancy.errors import (
    ArchivedError,
    InvalidField,
    LastOwner,
    NameTaken,
    NotFound,
)
from gateway.tenancy.keys import owned_keys, service_accounts
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.member_tables import check_email
from gateway.tenancy.members import members, users
from gateway.tenancy.members.users import User
from gateway.tenancy.pages import Cursor
from tests.gateway.tenancy.members.tenants import ME, Tenant

# ---- users


@pytest.mark.parametrize("written", ["Ann@Example.COM", "ann@example.com"])
def test_an_address_is_stored_in_lower_case(written: str) -> None:
    assert check_email(written) == "ann@example.com"


@pytest.mark.parametrize(
    "bad", ["", "a", "@b", "a@", "a b@c", "a@b@c", "a\n@b.c", "a\x00@b.c", "x" * 250 + "@b.cd"]
)
def test_what_is_no_address_is_refused_by_name(bad: str) -> None:
    with pytest.raises(InvalidField, match=r"^email: "):
        check_email(bad)


async def test_a_user_is_found_by_id_and_address_and_there_is_one_of_an_address(
    acme: Tenant, other: Tenant
) -> None:
    ann = await acme.add("Ann@x.example", "billing")
    assert ann.email == "ann@x.example" and ann.role == "billing"
    async with acme() as conn:
        found = await users.find_user(conn, org_id=acme.org_id, email="ANN@x.example")
        assert found == ann == await users.get_user(conn, org_id=acme.org_id, user_id=ann.id)
    with pytest.raises(NameTaken, match="email"):
        await acme.add("ann@X.example")
    assert (await other.add("ann@x.example")).id != ann.id
    with pytest.raises(InvalidField, match="role: must be one of owner"):
        await acme.add("b@x.example", "root")


async def test_users_are_paged_by_id_and_filtered_by_address(acme: Tenant) -> None:
    made = [acme.owner] + [await acme.add(f"u{n}@x.example") for n in range(4)]
    async with acme() as conn:
        page, more = await users.list_users(
            conn, org_id=acme.org_id, cursor=Cursor(limit=2, after=made[0].id)
        )
        assert (page, more) == (made[1:3], True)
        page, more = await users.list_users(
            conn, org_id=acme.org_id, cursor=Cursor(limit=2, after=made[2].id)
        )
        assert (page, more) == (made[3:], False)
        found, _ = await users.list_users(
            conn, org_id=acme.org_id, emails=["U1@x.example", "nobody@x.example"]
        )
        assert found == [made[2]]
        with pytest.raises(InvalidField, match="limit"):
            await users.list_users(conn, org_id=acme.org_id, cursor=Cursor(limit=101))


async def test_the_last_owner_keeps_the_role_and_stays(acme: Tenant) -> None:
    me = {"org_id": acme.org_id, "user_id": acme.owner.id, **ME}
    for verb in (
        lambda conn: users.change_role(conn, role="admin", **me),
        lambda conn: users.archive_user(conn, **me),
    ):
        with pytest.raises(LastOwner):
            async with acme() as conn:
                await verb(conn)
    second = await acme.add("second@x.example", "owner")
    async with acme() as conn:
        assert (await users.change_role(conn, role="reader", **me)).role == "reader"
    with pytest.raises(LastOwner):
        async with acme() as conn:
            await users.archive_user(conn, org_id=acme.org_id, user_id=second.id, **ME)


@pytest.mark.parametrize("_run", range(5))
async def test_of_two_owners_who_go_at_once_one_stays(acme: Tenant, _run: int) -> None:
    second = await acme.add("second@x.example", "owner")

    async def demote(user: User) -> bool:
        try:
            async with acme() as conn:
                await users.change_role(
                    conn, org_id=acme.org_id, user_id=user.id, role="admin", **ME
                )
        except LastOwner:
            return False
        return True

    async def remove(user: User) -> bool:
        try:
            async with acme() as conn:
                await users.archive_user(conn, org_id=acme.org_id, user_id=user.id, **ME)
        except LastOwner:
            return False
        return True

    assert sorted(await asyncio.gather(demote(acme.owner), remove(second))) == [False, True]
    async with acme() as conn:
        left, _ = await users.list_users(conn, org_id=acme.org_id)
    assert [user.role for user in left].count("owner") == 1


async def test_who_leaves_leaves_everything_and_may_come_back_as_somebody_new(
    acme: Tenant,
) -> None:
    ann = await acme.add("ann@x.example")
    async with acme() as conn:
        await members.add_member(conn, **acme.here, user_id=ann.id, role="member", **ME)
        await users.set_password(conn, org_id=acme.org_id, user_id=ann.id, password_hash="x", **ME)
        key = await create_key(
            conn,
            **acme.here,
            name="k",
            scopes=[SCOPE_INFERENCE],
            pepper=b"p",
            pepper_id="1",
            user_id=ann.id,
            actor=COMMAND_LINE,
        )
    async with acme() as conn:
        gone = await users.archive_user(conn, org_id=acme.org_id, user_id=ann.id, **ME)
        assert gone.archived_at is not None
    async with acme() as conn:
        with pytest.raises(NotFound):
            await users.get_user(conn, org_id=acme.org_id, user_id=ann.id)
        with pytest.raises(NotFound):
            await members.get_member(conn, **acme.here, user_id=ann.id)
        with pytest.raises(NotFound):
            await owned_keys.get_key(
                conn, org_id=acme.org_id, key_id=key.row.id, project_id=acme.project_id
            )
        with pytest.raises(NotFound):
            await users.set_password(
                conn, org_id=acme.org_id, user_id=ann.id, password_hash="y", **ME
            )
        left = await conn.execute(sa.text("SELECT password_hash FROM users WHERE role <> 'owner'"))
        assert left.scalar_one() is None
    assert (await acme.add("ann@x.example")).id != ann.id
    assert (await acme.actions())[-3:] == ["api_key.deleted", "user.deleted", "user.added"]


# ---- members of projects


async def test_a_member_is_added_changed_removed_and_added_again(acme: Tenant) -> None:
    ann = await acme.add("ann@x.example")
    one = {**acme.here, "user_id": ann.id}
    async with acme() as conn:
        made = await members.add_member(conn, **one, role="member", **ME)
        assert (made.email, made.role) == ("ann@x.example", "member")
        assert await members.get_member(conn, **one) == made
        changed = await members.change_member(conn, **one, role="owner", **ME)
        assert changed.role == "owner"
        assert await members.change_member(conn, **one, role="owner", **ME) == changed
        listed = await members.list_members(conn, **acme.here)
        assert listed == ([changed], False)
        by_user = await users.memberships(conn, org_id=acme.org_id, user_ids=[ann.id])
        assert [each.role for each in by_user[ann.id]] == ["owner"]
    with pytest.raises(NameTaken):
        async with acme() as conn:
            await members.add_member(conn, **one, role="member", **ME)
    async with acme() as conn:
        await members.remove_member(conn, **one, **ME)
        assert await members.list_members(conn, **acme.here) == ([], False)
        with pytest.raises(NotFound):
            await members.remove_member(conn, **one, **ME)
        assert (await members.add_member(conn, **one, role="member", **ME)).role == "member"
    assert (await acme.actions())[-4:] == [
        "project.user.added",
        "project.user.updated",
        "project.user.removed",
        "project.user.added",
    ]


async def test_a_member_has_a_projects_role_and_is_a_user(acme: Tenant) -> None:
    async with acme() as conn:
        with pytest.raises(InvalidField, match="role: must be one of owner, member"):
            await members.add_member(conn, **acme.here, user_id=acme.owner.id, role="admin", **ME)
        with pytest.raises(NotFound, match="user_id"):
            await members.add_member(conn, **acme.here, user_id="user_x", role="member", **ME)


# ---- projects


async def test_an_archived_project_is_shown_and_takes_nothing(acme: Tenant) -> None:
    async with acme() as conn:
        second = await projects.create_project(conn, org_id=acme.org_id, name="two", **ME)
    async with acme() as conn:
        gone = await projects.archive(conn, **acme.here, **ME)
        assert gone.archived_at is not None
        assert await projects.archive(conn, **acme.here, **ME) == gone
        assert await projects.get_project(conn, **acme.here) == gone
        live = await conn.execute(projects.select_projects(acme.org_id))
        assert [projects.Project(**row._mapping) for row in live] == [second]
        listed = projects.select_projects(acme.org_id, archived=True).order_by(tables.projects.c.id)
        everything = await conn.execute(listed)
        assert [projects.Project(**row._mapping) for row in everything] == [gone, second]
    user = {"user_id": acme.owner.id}
    uses: list[Callable[[AsyncConnection], Awaitable[object]]] = [
        lambda conn: projects.rename_project(conn, **acme.here, name="new", **ME),
        lambda conn: members.add_member(conn, **acme.here, **user, role="member", **ME),
        lambda conn: members.remove_member(conn, **acme.here, **user, **ME),
        lambda conn: service_accounts.create_service_account(conn, **acme.here, name="ci", **ME),
    ]
    for use in uses:
        with pytest.raises(ArchivedError):
            async with acme() as conn:
                await use(conn)
    async with acme() as conn:  # its name is free again
        await projects.create_project(conn, org_id=acme.org_id, name="web", **ME)


async def test_a_project_is_renamed_but_not_to_a_siblings_name(acme: Tenant) -> None:
    async with acme() as conn:
        await projects.create_project(conn, org_id=acme.org_id, name="two", **ME)
        renamed = await projects.rename_project(conn, **acme.here, name="three", **ME)
        assert renamed.name == "three"
        assert await projects.rename_project(conn, **acme.here, name="three", **ME) == renamed
        with pytest.raises(NameTaken):
            await projects.rename_project(conn, **acme.here, name="two", **ME)
        assert await projects.get_project(conn, **acme.here) == renamed
    assert (await acme.actions())[-1] == "project.updated"


# ---- service accounts


async def test_a_service_account_lives_and_its_keys_end_with_it(acme: Tenant) -> None:
    async with acme() as conn:
        made = await service_accounts.create_service_account(conn, **acme.here, name="ci", **ME)
        one = {**acme.here, "service_account_id": made.id}
        assert made.project_role == "member" and made.role == "developer"
        key = await create_key(
            conn,
            **acme.here,
            name="k",
            scopes=[SCOPE_INFERENCE],
            pepper=b"p",
            pepper_id="1",
            service_account_id=made.id,
            actor=COMMAND_LINE,
        )
        changed = await service_accounts.update_service_account(
            conn, **one, name="cd", project_role="owner", **ME
        )
        assert (changed.name, changed.project_role) == ("cd", "owner")
        assert changed == await service_accounts.update_service_account(conn, **one, **ME)
        with pytest.raises(InvalidField, match="role"):
            await service_accounts.update_service_account(conn, **one, project_role="none", **ME)
        listed = await service_accounts.list_service_accounts(conn, **acme.here)
        assert listed == ([changed], False)
    async with acme() as conn:
        [shown], _ = await owned_keys.list_project_keys(conn, **acme.here)
        assert shown.id == key.row.id and shown.active
        assert shown.owner is not None and shown.owner.project_role == "owner"
        await service_accounts.archive_service_account(conn, **one, **ME)
        with pytest.raises(NotFound):
            await service_accounts.get_service_account(conn, **one)
        assert await owned_keys.list_project_keys(conn, **acme.here) == ([], False)
    assert (await acme.actions())[-2:] == ["api_key.deleted", "service_account.deleted"]


async def test_keys_are_listed_by_whether_their_owners_may_use_the_project(acme: Tenant) -> None:
    ann = await acme.add("ann@x.example")
    made = {}
    async with acme() as conn:
        for name, user_id in (("nobody's", None), ("ann's", ann.id), ("owner's", acme.owner.id)):
            key = await create_key(
                conn,
                **acme.here,
                name=name,
                scopes=[SCOPE_INFERENCE],
                pepper=b"p",
                pepper_id="1",
                user_id=user_id,
                actor=COMMAND_LINE,
            )
            made[name] = key.row.id
        for access, wanted in (
            ("any", {"nobody's", "ann's", "owner's"}),
            ("active", {"nobody's", "owner's"}),
            ("inactive", {"ann's"}),
        ):
            found, _ = await owned_keys.list_project_keys(
                conn,
                **acme.here,
                access=access,  # type: ignore[arg-type]
            )
            assert {key.name for key in found} == wanted
