"""Projects of an organization.

An archived project is for ever: it is shown, and nothing in it can be used or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.queries import Query, ask
from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.tenancy.changes import changing, unchecked
from gateway.tenancy.errors import ArchivedError, InvalidField, NameTaken, NotFound
from gateway.tenancy.tables import check_name, check_plan, orgs, projects


class Project(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    name: str
    plan: str | None
    models_mode: Literal["allow_list", "deny_list"] | None
    """How `models` is to be read; None: all models may be used."""
    models: list[str] | None
    zero_retention: bool
    """Nothing is kept of what is asked and answered in it."""
    store_content: bool
    """The texts of its requests and answers are stored beside the log of requests."""
    created_at: datetime
    archived_at: datetime | None


Check = Callable[[Project], None]
"""Raises what keeps the row, as it stands under its lock, from being changed."""


async def create_project(
    conn: AsyncConnection,
    *,
    org_id: str,
    name: str,
    plan: str | None = None,
    zero_retention: bool = False,
    store_content: bool = False,
    actor: Actor,
) -> Project:
    """Raises: InvalidField, NameTaken, NotFound (org, plan)."""
    check_kept(zero_retention=zero_retention, store_content=store_content)
    # The lock keeps the organization from being archived before this commits.
    live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(read=True)) is None:
        raise NotFound("org", f"no organization {org_id!r}")
    row: dict[str, Any] = {"id": f"proj_{uuid7().hex}", "org_id": org_id, "name": check_name(name)}
    kept = {"zero_retention": zero_retention, "store_content": store_content}
    row |= {"plan": await check_plan(conn, plan), **kept}
    added = insert(projects).values(**row)
    made = (await conn.execute(added.on_conflict_do_nothing().returning(projects))).one_or_none()
    if made is None:
        raise NameTaken("name", f"the organization has a project {name!r}")
    project = Project(**made._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="project.created",
        target=project.id,
        after={"name": project.name, "plan": project.plan, **kept},
    )
    return project


async def get_project(conn: AsyncConnection, *, org_id: str, project_id: str) -> Project:
    """A live or an archived one. Raises: NotFound."""
    return await ask(conn, project_query(org_id=org_id, project_id=project_id))


def project_query(*, org_id: str, project_id: str) -> Query[Project]:
    """Return the query of `get_project`."""

    def read(rows: Sequence[sa.Row[Any]]) -> Project:
        if not rows:
            raise NotFound("project", f"no project {project_id!r}")
        [row] = rows
        return Project(**row._mapping)

    return Query(_one(org_id, project_id), read)


async def lock_project(conn: AsyncConnection, *, org_id: str, project_id: str) -> Project:
    """A live one that cannot be archived before this commits. Raises: NotFound, ArchivedError."""
    return await _live(conn, _one(org_id, project_id).with_for_update(read=True), project_id)


async def hold_project(conn: AsyncConnection, *, org_id: str, project_id: str) -> Project:
    """A live one that nobody else changes, or adds to, before this commits. Raises: NotFound,
    ArchivedError."""
    return await _live(conn, _one(org_id, project_id).with_for_update(key_share=True), project_id)


def keeps_nothing(org_id: sa.Column[str], project_id: sa.Column[str]) -> sa.ColumnElement[bool]:
    """Select rows of projects that are archived, as their organization may be, or are to keep
    nothing: what their tenants stored is erased."""
    gone = (projects.c.archived_at.is_not(None), orgs.c.archived_at.is_not(None))
    return _project_of(org_id, project_id).where(sa.or_(projects.c.zero_retention, *gone))


def with_project_names(
    listed: sa.Select[Any], project: sa.ColumnElement[str], org_id: str
) -> sa.Select[Any]:
    """Add `project_name` to what is selected, also of archived ones; null of what is none.
    `project`: the column of its id."""
    name = sa.select(projects.c.name).where(projects.c.org_id == org_id, projects.c.id == project)
    return listed.add_columns(name.scalar_subquery().label("project_name"))


def stores_content(
    org_id: sa.ColumnElement[str], project_id: sa.ColumnElement[str]
) -> sa.ColumnElement[bool]:
    """Select rows of live projects that store the texts of requests now: those of all others are
    erased."""
    live = (projects.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
    return _project_of(org_id, project_id).where(
        projects.c.store_content, sa.not_(projects.c.zero_retention), *live
    )


def _project_of(org_id: sa.ColumnElement[str], project_id: sa.ColumnElement[str]) -> sa.Exists:
    """Select rows by their project and its organization."""
    joined = projects.join(orgs, projects.c.org_id == orgs.c.id)
    own = (projects.c.org_id == org_id, projects.c.id == project_id)
    return sa.exists().select_from(joined).where(*own)


def check_kept(*, zero_retention: bool, store_content: bool) -> None:
    """Raises: InvalidField where a project is to keep nothing and store texts."""
    if zero_retention and store_content:
        raise InvalidField(
            "store_content", "cannot be true in a project that keeps nothing (zero_retention)"
        )


def select_projects(org_id: str, *, archived: bool = False) -> sa.Select[Any]:
    """Select the live projects of an organization, or with `archived` all."""
    listed = sa.select(projects).where(projects.c.org_id == org_id)
    return listed if archived else listed.where(projects.c.archived_at.is_(None))


async def rename_project(
    conn: AsyncConnection, *, org_id: str, project_id: str, name: str, actor: Actor
) -> Project:
    """Raises: InvalidField, NameTaken, NotFound, ArchivedError."""
    before = await hold_project(conn, org_id=org_id, project_id=project_id)
    return await _change(conn, before, {"name": name}, actor)


async def find_project(conn: AsyncConnection, *, org_id: str, name: str) -> Project:
    """A live project by the name people know. Raises: NotFound."""
    found = sa.select(projects).where(projects.c.org_id == org_id, projects.c.name == name)
    row = (await conn.execute(found.where(projects.c.archived_at.is_(None)))).one_or_none()
    if row is None:
        live = sa.select(projects.c.name).where(projects.c.org_id == org_id)
        live = live.where(projects.c.archived_at.is_(None)).order_by(projects.c.id).limit(5)
        others = ", ".join(map(repr, (await conn.scalars(live)).all()))
        there = f"it has {others}" if others else "it has none yet"
        raise NotFound("project", f"no project {name!r} in the organization; {there}")
    return Project(**row._mapping)


async def update_project(
    db: AsyncEngine,
    redis: Redis,
    project_id: str,
    values: Mapping[str, Any],
    *,
    org_id: str,
    actor: Actor,
    check: Check = unchecked,
) -> Project:
    """Update a project; `values`: name, plan, zero_retention, store_content. Every worker goes by
    it within a second.

    Raises: InvalidField, NameTaken, NotFound (project, plan), ArchivedError, ChangeNotAnnounced,
    and what `check` raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await hold_project(conn, org_id=org_id, project_id=project_id)
        check(before)
        if "plan" in values:
            await check_plan(conn, values["plan"])
        return await _change(conn, before, values, actor)


async def _change(
    conn: AsyncConnection, before: Project, values: Mapping[str, Any], actor: Actor
) -> Project:
    """One that is held. Raises: InvalidField, NameTaken."""
    if "name" in values:
        check_name(values["name"])
    check_kept(
        zero_retention=values.get("zero_retention", before.zero_retention),
        store_content=values.get("store_content", before.store_content),
    )
    wanted = {key: value for key, value in values.items() if getattr(before, key) != value}
    if not wanted:
        return before
    changed = sa.update(projects).where(projects.c.org_id == before.org_id)
    changed = changed.where(projects.c.id == before.id).values(**wanted)
    try:
        async with conn.begin_nested():
            made = await conn.execute(changed.returning(projects))
    except IntegrityError:
        raise NameTaken("name", f"the organization has a project {wanted['name']!r}") from None
    await record(
        conn,
        org_id=before.org_id,
        actor=actor,
        action="project.updated",
        target=before.id,
        before={key: getattr(before, key) for key in wanted},
        after=wanted,
    )
    return Project(**made.one()._mapping)


async def archive(conn: AsyncConnection, *, org_id: str, project_id: str, actor: Actor) -> Project:
    """Archive a project: its keys stop working. Idempotent. To be announced. Raises: NotFound."""
    found = _one(org_id, project_id).with_for_update(key_share=True)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("project", f"no project {project_id!r}")
    before = Project(**row._mapping)
    if before.archived_at is not None:
        return before
    gone = sa.update(projects).where(projects.c.org_id == org_id, projects.c.id == project_id)
    made = await conn.execute(gone.values(archived_at=sa.func.now()).returning(projects))
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="project.archived",
        target=project_id,
        before={"name": before.name},
    )
    return Project(**made.one()._mapping)


def _one(org_id: str, project_id: str) -> sa.Select[Any]:
    return sa.select(projects).where(projects.c.org_id == org_id, projects.c.id == project_id)


async def _live(conn: AsyncConnection, found: sa.Select[Any], project_id: str) -> Project:
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("project", f"no project {project_id!r}")
    if row.archived_at is not None:
        raise ArchivedError("project", f"project {project_id!r} is archived")
    return Project(**row._mapping)
