"""Keeps which models a project may use: a list of those allowed, or of those denied, or neither.

The lookup of a key reads the columns too (`records.find_keys`). A model need not be served (yet,
or any more).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.tenancy.changes import changing
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.restrictions import Mode, ModelPermissions, check_models
from gateway.tenancy.tables import projects


async def read_model_permissions(
    conn: AsyncConnection, project_id: str, *, org_id: str, lock: bool = False
) -> ModelPermissions:
    """Read those of a live project. Raises: NotFound."""
    found = sa.select(projects.c.models_mode, projects.c.models)
    found = found.where(projects.c.org_id == org_id, projects.c.id == project_id)
    found = found.where(projects.c.archived_at.is_(None))
    if lock:
        found = found.with_for_update()
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("project", f"no project {project_id!r}")
    return ModelPermissions(mode=row.models_mode, models=row.models or [])


async def update_model_permissions(
    db: AsyncEngine,
    redis: Redis,
    project_id: str,
    *,
    org_id: str,
    mode: Mode | None,
    models: Iterable[str] = (),
    actor: Actor,
) -> ModelPermissions:
    """Replace the list; every worker goes by it within a second. Mode None forgets the list.

    Raises: InvalidField, NotFound, ChangeNotAnnounced.
    """
    listed = [] if mode is None else check_models(models)
    wanted = ModelPermissions(mode=mode, models=listed)
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await read_model_permissions(conn, project_id, org_id=org_id, lock=True)
        changed = sa.update(projects).where(projects.c.id == project_id)
        await conn.execute(
            changed.values(models_mode=mode, models=None if mode is None else wanted.models)
        )
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="project.updated",
            target=project_id,
            before={"models": msgspec.to_builtins(before)},
            after={"models": msgspec.to_builtins(wanted)},
        )
    return wanted
