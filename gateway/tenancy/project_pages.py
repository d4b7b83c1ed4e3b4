"""Reads projects and people as somebody looks through them: how many belong to a project, and which
projects a person is in."""

from __future__ import annotations

from datetime import datetime

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query
from gateway.principal import Role
from gateway.tenancy.member_tables import project_members, users
from gateway.tenancy.pages import FIRST, Cursor, ends, like, read_page
from gateway.tenancy.projects import Project
from gateway.tenancy.tables import api_keys, plans, projects


class ProjectLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    plan: str | None
    zero_retention: bool
    store_content: bool
    created_at: datetime
    archived_at: datetime | None
    num_members: int
    num_keys: int
    """The keys that were not revoked."""


class PersonLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    email: str
    name: str
    role: Role
    created_at: datetime
    projects: str | None
    """The names of the projects that they are a member of, the first ones."""


async def list_project_lines(
    conn: AsyncConnection, *, org_id: str, archived: bool = False, cursor: Cursor = FIRST
) -> tuple[list[ProjectLine], bool]:
    """Raises: InvalidField (limit)."""
    c = projects.c
    members = sa.select(sa.func.count()).where(
        project_members.c.org_id == org_id,
        project_members.c.project_id == c.id,
        project_members.c.removed_at.is_(None),
    )
    keys = sa.select(sa.func.count()).where(
        api_keys.c.org_id == org_id, api_keys.c.project_id == c.id, api_keys.c.revoked_at.is_(None)
    )
    columns = (c.id, c.name, c.plan, c.zero_retention, c.store_content)
    found = sa.select(
        *columns,
        *(c.created_at, c.archived_at),
        members.correlate(projects).scalar_subquery().label("num_members"),
        keys.correlate(projects).scalar_subquery().label("num_keys"),
    ).where(c.org_id == org_id)
    ended = c.archived_at.is_not(None) if archived else c.archived_at.is_(None)
    rows, more = await read_page(conn, found.where(ended), c.id, cursor)
    return [ProjectLine(**row._mapping) for row in rows], more


async def list_people(
    conn: AsyncConnection, *, org_id: str, cursor: Cursor = FIRST
) -> tuple[list[PersonLine], bool]:
    """Raises: InvalidField (limit)."""
    c = users.c
    joined = project_members.join(
        projects,
        sa.and_(
            project_members.c.org_id == projects.c.org_id,
            project_members.c.project_id == projects.c.id,
        ),
    )
    names = sa.select(projects.c.name).select_from(joined)
    names = names.where(project_members.c.org_id == org_id, project_members.c.user_id == c.id)
    names = names.where(project_members.c.removed_at.is_(None), projects.c.archived_at.is_(None))
    first = names.correlate(users).order_by(projects.c.name).limit(5).subquery("first")
    named = sa.select(sa.func.string_agg(first.c.name, sa.literal(", ")))
    found = sa.select(
        *(c.id, c.email, c.name, c.role, c.created_at),
        named.scalar_subquery().label("projects"),
    )
    found = found.where(c.org_id == org_id, c.archived_at.is_(None))
    rows, more = await read_page(conn, found, c.id, cursor)
    return [PersonLine(**row._mapping) for row in rows], more


def projects_query(*, org_id: str, text: str, limit: int) -> Query[list[Project]]:
    """Return the query of live projects with a text in their name or at the end of their id, newest
    first."""
    c = projects.c
    found = sa.select(projects).where(c.org_id == org_id, c.archived_at.is_(None))
    found = found.where(sa.or_(like(c.name, text), ends(c.id, text)))
    found = found.order_by(c.id.desc()).limit(limit)
    return Query(found, lambda rows: [Project(**row._mapping) for row in rows])


def people_query(*, org_id: str, text: str, limit: int) -> Query[list[PersonLine]]:
    """Return the query of people with a text in their address or name, or at the end of their
    id."""
    c = users.c
    columns = (c.id, c.email, c.name, c.role, c.created_at)
    found = sa.select(*columns, sa.cast(sa.null(), sa.Text).label("projects"))
    found = found.where(c.org_id == org_id, c.archived_at.is_(None))
    found = found.where(sa.or_(like(c.email, text), like(c.name, text), ends(c.id, text)))
    found = found.order_by(c.id).limit(limit)
    return Query(found, lambda rows: [PersonLine(**row._mapping) for row in rows])


def plans_query() -> Query[list[str]]:
    """Return the query of the plans that can be given."""
    live = sa.select(plans.c.name).where(plans.c.archived_at.is_(None)).order_by(plans.c.name)
    return Query(live, lambda rows: [row.name for row in rows])
