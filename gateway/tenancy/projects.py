"""Projects of an organization. Above: `cli`, `bootstrap`, admin routes. Below: `tables`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.ids import uuid7
from gateway.tenancy.changes import EVERYTHING, changing
from gateway.tenancy.errors import NameTaken, NotFound
from gateway.tenancy.tables import MAX_PAGE, check_name, check_plan, orgs, projects


class Project(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    name: str
    plan: str | None
    models_mode: Literal["allow_list", "deny_list"] | None
    """What `models` is; None: all models may be used."""
    models: list[str] | None
    created_at: datetime
    archived_at: datetime | None


async def create_project(
    conn: AsyncConnection, *, org_id: str, name: str, plan: str | None = None
) -> Project:
    """Raises: InvalidField, NameTaken, NotFound (org, plan)."""
    # The lock keeps the organization from being archived before this commits.
    live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(read=True)) is None:
        raise NotFound("org", f"no organization {org_id!r}")
    row = {"id": f"proj_{uuid7().hex}", "org_id": org_id, "name": check_name(name)}
    added = insert(projects).values(**row, plan=await check_plan(conn, plan))
    made = (await conn.execute(added.on_conflict_do_nothing().returning(projects))).one_or_none()
    if made is None:
        raise NameTaken("name", f"the organization has a project {name!r}")
    return Project(**made._mapping)


async def find_project(conn: AsyncConnection, *, org_id: str, name: str) -> Project:
    """A live project by the name people know. Raises: NotFound."""
    found = sa.select(projects).where(projects.c.org_id == org_id, projects.c.name == name)
    row = (await conn.execute(found.where(projects.c.archived_at.is_(None)))).one_or_none()
    if row is None:
        raise NotFound("project", f"no project {name!r} in organization {org_id!r}")
    return Project(**row._mapping)


async def list_projects(conn: AsyncConnection, *, org_id: str, after: str = "") -> list[Project]:
    """Up to MAX_PAGE live projects with ids above `after`, oldest first."""
    live = sa.select(projects).where(projects.c.org_id == org_id, projects.c.id > after)
    live = live.where(projects.c.archived_at.is_(None))
    rows = await conn.execute(live.order_by(projects.c.id).limit(MAX_PAGE))
    return [Project(**row._mapping) for row in rows]


async def update_project_plan(
    db: AsyncEngine, redis: Redis, project_id: str, plan: str | None, *, org_id: str
) -> None:
    """Raises: NotFound, ChangeNotAnnounced."""
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        changed = sa.update(projects).where(projects.c.org_id == org_id)
        changed = changed.where(projects.c.id == project_id, projects.c.archived_at.is_(None))
        done = await conn.execute(changed.values(plan=await check_plan(conn, plan)))
        if done.rowcount == 0:
            raise NotFound("project", f"no project {project_id!r}")


async def archive_project(db: AsyncEngine, redis: Redis, project_id: str, *, org_id: str) -> None:
    """Its keys stop working. Idempotent. Raises: NotFound, ChangeNotAnnounced."""
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        moment = sa.func.coalesce(projects.c.archived_at, sa.func.now())
        archived = sa.update(projects).where(projects.c.org_id == org_id)
        archived = archived.where(projects.c.id == project_id)
        done = await conn.execute(archived.values(archived_at=moment))
        if done.rowcount == 0:
            raise NotFound("project", f"no project {project_id!r}")
