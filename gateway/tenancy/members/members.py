"""Members of projects: users of the org who may use a project, as its owners or as its members.

Who owns or administers the org needs no membership to be at home in a project.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query, ask
from gateway.audit.log import Actor, record
from gateway.tenancy.errors import NameTaken, NotFound
from gateway.tenancy.member_tables import (
    PROJECT_ROLES,
    ProjectRole,
    check_role,
    project_members,
    users,
)
from gateway.tenancy.members.users import get_user
from gateway.tenancy.pages import FIRST, Cursor, page_query
from gateway.tenancy.projects import lock_project


class Member(msgspec.Struct, frozen=True, kw_only=True):
    project_id: str
    user_id: str
    email: str
    name: str
    role: ProjectRole
    added_at: datetime


COLUMNS = [
    *(project_members.c[field] for field in ("project_id", "user_id", "role", "added_at")),
    users.c.email,
    users.c.name,
]


async def add_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str, role: str, actor: Actor
) -> Member:
    """Add a member; to be announced: keys that the user has there work again.

    Raises: InvalidField, NotFound (project, user), ArchivedError, NameTaken (is a member).
    """
    wanted = check_role(role, PROJECT_ROLES)
    await lock_project(conn, org_id=org_id, project_id=project_id)
    await get_user(conn, org_id=org_id, user_id=user_id)
    if not await join(conn, org_id=org_id, project_id=project_id, user_id=user_id, role=wanted):
        raise NameTaken("user_id", "the user is a member of the project")
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="project.user.added",
        target=user_id,
        after={"project_id": project_id, "role": wanted},
    )
    return await get_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)


async def join(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str, role: str
) -> bool:
    """Join the project; False if the user is a member already; whoever was one comes back to the
    same row."""
    row = {"org_id": org_id, "project_id": project_id, "user_id": user_id, "role": role}
    added = insert(project_members).values(**row)
    again = {"role": role, "added_at": sa.func.now(), "removed_at": None}
    added = added.on_conflict_do_update(
        index_elements=["project_id", "user_id"],
        set_=again,
        where=project_members.c.removed_at.is_not(None),
    )
    made = await conn.execute(added.returning(project_members.c.user_id))
    return made.one_or_none() is not None


async def get_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str
) -> Member:
    """Raises: NotFound."""
    found = _members(org_id, project_id).where(project_members.c.user_id == user_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("user_id", f"no user {user_id!r} in project {project_id!r}")
    return Member(**row._mapping)


async def hold_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str
) -> Member:
    """One that nobody changes before this commits. Raises: NotFound, ArchivedError."""
    await lock_project(conn, org_id=org_id, project_id=project_id)
    held = sa.select(project_members.c.user_id).where(project_members.c.org_id == org_id)
    held = held.where(project_members.c.project_id == project_id)
    held = held.where(project_members.c.user_id == user_id)
    await conn.execute(held.with_for_update(key_share=True))
    return await get_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)


async def list_members(
    conn: AsyncConnection, *, org_id: str, project_id: str, cursor: Cursor = FIRST
) -> tuple[list[Member], bool]:
    """Raises: InvalidField (limit)."""
    return await ask(conn, members_query(org_id=org_id, project_id=project_id, cursor=cursor))


def members_query(
    *, org_id: str, project_id: str, cursor: Cursor = FIRST
) -> Query[tuple[list[Member], bool]]:
    """Return the query of `list_members`. Raises: InvalidField (limit)."""
    listed, key = _members(org_id, project_id), project_members.c.user_id
    return page_query(listed, key, cursor, lambda row: Member(**row._mapping))


async def change_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str, role: str, actor: Actor
) -> Member:
    """Raises: InvalidField, NotFound, ArchivedError."""
    wanted = check_role(role, PROJECT_ROLES)
    before = await hold_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)
    if before.role == wanted:
        return before
    changed = _one(org_id, project_id, user_id).values(role=wanted)
    await conn.execute(changed)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="project.user.updated",
        target=user_id,
        before={"project_id": project_id, "role": before.role},
        after={"project_id": project_id, "role": wanted},
    )
    return await get_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)


async def remove_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str, actor: Actor
) -> None:
    """Remove a member; to be announced: keys that the user has there stop working.

    Raises: NotFound, ArchivedError.
    """
    before = await hold_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)
    removed = _one(org_id, project_id, user_id).values(removed_at=sa.func.now())
    await conn.execute(removed)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="project.user.removed",
        target=user_id,
        before={"project_id": project_id, "role": before.role},
    )


def _one(org_id: str, project_id: str, user_id: str) -> sa.Update:
    found = sa.update(project_members).where(project_members.c.org_id == org_id)
    found = found.where(project_members.c.project_id == project_id)
    return found.where(project_members.c.user_id == user_id, project_members.c.removed_at.is_(None))


def _members(org_id: str, project_id: str) -> sa.Select[Any]:
    joined = project_members.join(users, project_members.c.user_id == users.c.id)
    found = sa.select(*COLUMNS).select_from(joined).where(project_members.c.org_id == org_id)
    return found.where(
        project_members.c.project_id == project_id, project_members.c.removed_at.is_(None)
    )
