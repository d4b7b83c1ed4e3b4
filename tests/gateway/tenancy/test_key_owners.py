"""A key has its owner's role, and is good for nothing once they may not use its project."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.principal import SCOPE_ADMIN, SCOPE_INFERENCE
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.keys import create_key, hash_key
from gateway.tenancy.keys.records import KeyRecord
from gateway.tenancy.member_tables import project_members, service_accounts, users
from gateway.tenancy.orgs import archive_org, create_org
from gateway.tenancy.projects import create_project
from tests.gateway.tenancy.found_keys import find_key

PEPPER, PEPPER_ID = b"p" * 32, "pepper-1"
USER, ACCOUNT = "user_1", "svc_acct_1"


async def make_key(conn: AsyncConnection, role: str, project_role: str) -> str:
    """Create a project, a user with that role, and a service account with that role in the project,
    for their keys; return the project's id."""
    org = await create_org(conn, name="acme", actor=COMMAND_LINE)
    project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
    person = {"id": USER, "email": "a@example.com", "name": "Ann", "role": role}
    await conn.execute(sa.insert(users).values(org_id=org.id, **person))
    machine = {"id": ACCOUNT, "name": "ci", "role": "developer", "project_role": project_role}
    machine |= {"org_id": org.id, "project_id": project.id}
    await conn.execute(sa.insert(service_accounts).values(**machine))
    return project.id


async def own(conn: AsyncConnection, project_id: str | None, **owner: str) -> KeyRecord:
    """A new key of `owner`, as it is found."""
    org_id = await conn.scalar(sa.select(users.c.org_id))
    made = await create_key(
        conn,
        org_id=str(org_id),
        project_id=project_id,
        name="k",
        scopes=[SCOPE_INFERENCE if project_id else SCOPE_ADMIN],
        pepper=PEPPER,
        pepper_id=PEPPER_ID,
        **owner,  # type: ignore[arg-type]
        actor=COMMAND_LINE,
    )
    found = await look_up(conn, hash_key(PEPPER, made.secret))
    assert found.row == made.row
    return found


async def look_up(conn: AsyncConnection, key_hash: str) -> KeyRecord:
    found = await find_key(conn, key_hash=key_hash, pepper_id=PEPPER_ID)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("role", "active"), [("owner", True), ("admin", True), ("developer", False)]
)
async def test_who_runs_the_org_is_at_home_in_every_project_and_others_are_members(
    db: AsyncEngine, role: str, active: bool
) -> None:
    async with db.begin() as conn:
        project_id = await make_key(conn, role, "member")
        found = await own(conn, project_id, user_id=USER)
        key = found.key_hash
        assert (found.role, found.owner_active) == (role, active)
        member = sa.insert(project_members).from_select(
            ["org_id", "project_id", "user_id", "role"],
            sa.select(users.c.org_id, sa.literal(project_id), users.c.id, sa.literal("member")),
        )
        await conn.execute(member)
        assert (await look_up(conn, key)).owner_active
        await conn.execute(sa.update(project_members).values(removed_at=sa.func.now()))
        assert (await look_up(conn, key)).owner_active is active
        await conn.execute(sa.update(users).values(archived_at=sa.func.now()))
        assert not (await look_up(conn, key)).owner_active


@pytest.mark.parametrize(
    ("project_role", "active"), [("owner", True), ("member", True), ("none", False)]
)
async def test_a_service_accounts_key_works_while_it_has_a_role_in_the_project(
    db: AsyncEngine, project_role: str, active: bool
) -> None:
    async with db.begin() as conn:
        project_id = await make_key(conn, "owner", project_role)
        found = await own(conn, project_id, service_account_id=ACCOUNT)
        assert (found.role, found.owner_active) == ("developer", active)
        await conn.execute(sa.update(service_accounts).values(archived_at=sa.func.now()))
        assert not (await look_up(conn, found.key_hash)).owner_active
        with pytest.raises(NotFound, match="service_account_id"):
            await own(conn, project_id, service_account_id=ACCOUNT)


async def test_only_a_key_of_administration_is_of_a_whole_org(
    db: AsyncEngine, redis: Redis
) -> None:
    async with db.begin() as conn:
        await make_key(conn, "owner", "member")
        found = await own(conn, None, user_id=USER)
        assert found.row.project_id is None and found.owner_active and not found.archived
        org_id = found.row.org_id
    common = {"name": "k", "pepper": PEPPER, "pepper_id": PEPPER_ID, "project_id": None}
    async with db.begin() as conn:
        with pytest.raises(InvalidField, match="project"):
            await create_key(
                conn, org_id=org_id, scopes=[SCOPE_INFERENCE], **common, actor=COMMAND_LINE
            )  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="org"):
            await create_key(
                conn, org_id="org_none", scopes=[SCOPE_ADMIN], **common, actor=COMMAND_LINE
            )  # type: ignore[arg-type]
    await archive_org(db, redis, org_id, actor=COMMAND_LINE)
    async with db.begin() as conn:
        assert (await look_up(conn, found.key_hash)).archived
