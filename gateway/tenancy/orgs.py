"""Organizations: who is billed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.invoices.suspension import suspended_since
from billing.queries import Query, ask
from gateway.audit.log import Actor, record_for_both
from gateway.ids import uuid7
from gateway.tenancy.changes import changing, unchecked
from gateway.tenancy.errors import NameTaken, NotFound
from gateway.tenancy.tables import check_name, check_plan, orgs


class Org(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    plan: str | None
    is_operator: bool
    """It runs the installation."""
    cors_origins: list[str]
    """Origins of web pages that may call the API from a browser with this org's keys."""
    prepaid: bool
    """It spends no more than it was credited."""
    shows_cost: bool
    """Its answers say what they cost, unless a key or a request says otherwise."""
    created_at: datetime
    archived_at: datetime | None
    suspension_lifted_at: datetime | None
    """Suspensions from before this moment are lifted (`suspended_by`)."""


Check = Callable[[Org], None]
"""Raises what keeps the row, as it stands under its lock, from being changed."""


async def create_org(
    conn: AsyncConnection,
    *,
    name: str,
    plan: str | None = None,
    is_operator: bool = False,
    actor: Actor,
    operator_org: str | None = None,
) -> Org:
    """Create an organization; is_operator: it runs the installation. `operator_org`: whose
    credential asks; it is told in that org's audit log, too.

    Raises: InvalidField, NameTaken, NotFound (plan).
    """
    row = {"id": f"org_{uuid7().hex}", "name": check_name(name), "is_operator": is_operator}
    added = insert(orgs).values(**row, plan=await check_plan(conn, plan))
    made = (await conn.execute(added.on_conflict_do_nothing().returning(orgs))).one_or_none()
    if made is None:
        raise NameTaken("name", f"there is an organization {name!r}")
    org = Org(**made._mapping)
    after = {"name": org.name, "plan": org.plan}
    await record_for_both(
        conn,
        org_id=org.id,
        operator_org=operator_org,
        actor=actor,
        action="organization.created",
        target=org.id,
        after=after,
    )
    return org


async def get_org(conn: AsyncConnection, org_id: str) -> Org:
    """A live or an archived one. Raises: NotFound."""
    return await ask(conn, org_query(org_id))


def org_query(org_id: str) -> Query[Org]:
    """Return the query of `get_org`."""
    return _query(sa.select(orgs).where(orgs.c.id == org_id), org_id)


async def find_org(conn: AsyncConnection, *, name: str) -> Org:
    """A live organization by the name people know. Raises: NotFound."""
    found = sa.select(orgs).where(orgs.c.name == name, orgs.c.archived_at.is_(None))
    return await ask(conn, _query(found, name))


def select_orgs(*, archived: bool = False) -> sa.Select[Any]:
    """Select the live organizations, or with `archived` all."""
    listed = sa.select(orgs)
    return listed if archived else listed.where(orgs.c.archived_at.is_(None))


async def update_org(
    db: AsyncEngine,
    redis: Redis,
    org_id: str,
    values: Mapping[str, Any],
    *,
    actor: Actor,
    operator_org: str | None = None,
    check: Check = unchecked,
) -> Org:
    """Update an organization; `values`: name, plan, prepaid, shows_cost, and cors_origins that were
    checked. Every worker goes by it within a second.

    Raises: InvalidField, NameTaken, NotFound (a live org, plan), ChangeNotAnnounced, and what
    `check` raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await _hold_org(conn, org_id)
        if before.archived_at is not None:
            raise NotFound("org", f"no organization {org_id!r}")
        check(before)
        if "name" in values:
            check_name(values["name"])
        if "plan" in values:
            await check_plan(conn, values["plan"])
        changed = {key: value for key, value in values.items() if getattr(before, key) != value}
        if not changed:
            return before
        updated = sa.update(orgs).where(orgs.c.id == org_id).values(**changed)
        try:
            async with conn.begin_nested():
                made = (await conn.execute(updated.returning(orgs))).one()
        except IntegrityError:
            raise NameTaken("name", f"there is an organization {changed['name']!r}") from None
        await record_for_both(
            conn,
            org_id=org_id,
            operator_org=operator_org,
            actor=actor,
            action="organization.updated",
            target=org_id,
            before={key: getattr(before, key) for key in changed},
            after=changed,
        )
        return Org(**made._mapping)


async def archive_org(
    db: AsyncEngine,
    redis: Redis,
    org_id: str,
    *,
    actor: Actor,
    operator_org: str | None = None,
    check: Check = unchecked,
) -> Org:
    """Archive an organization: its keys stop working.

    Idempotent.
    Raises: NotFound, ChangeNotAnnounced, and what `check` raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await _hold_org(conn, org_id)
        check(before)
        if before.archived_at is not None:
            return before
        archived = sa.update(orgs).where(orgs.c.id == org_id).values(archived_at=sa.func.now())
        made = (await conn.execute(archived.returning(orgs))).one()
        said = {"name": before.name, "plan": before.plan}
        await record_for_both(
            conn,
            org_id=org_id,
            operator_org=operator_org,
            actor=actor,
            action="organization.archived",
            target=org_id,
            before=said,
        )
        return Org(**made._mapping)


async def lift_suspension(
    db: AsyncEngine,
    redis: Redis,
    org_id: str,
    *,
    actor: Actor,
    operator_org: str | None = None,
    check: Check = unchecked,
) -> Org:
    """Lift the present suspension; every worker goes by it within a second.

    Raises: NotFound, ChangeNotAnnounced, and what `check` raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await _hold_org(conn, org_id)
        check(before)
        lifted = sa.update(orgs).where(orgs.c.id == org_id)
        # Whatever clocks say, behind all that has suspended it by now.
        moment = sa.func.greatest(sa.func.now(), suspended_since(org_id))
        lifted = lifted.values(suspension_lifted_at=moment)
        made = Org(**(await conn.execute(lifted.returning(orgs))).one()._mapping)
        said = {"suspension_lifted_at": made.suspension_lifted_at}
        await record_for_both(
            conn,
            org_id=org_id,
            operator_org=operator_org,
            actor=actor,
            action="organization.suspension_lifted",
            target=org_id,
            after=said,
        )
        return made


async def _hold_org(conn: AsyncConnection, org_id: str) -> Org:
    """Lock an organization: nobody else changes it before this commits. Raises: NotFound."""
    held = sa.select(orgs).where(orgs.c.id == org_id).with_for_update(key_share=True)
    return await ask(conn, _query(held, org_id))


def _query(found: sa.Select[Any], name: str) -> Query[Org]:
    def read(rows: Sequence[sa.Row[Any]]) -> Org:
        if not rows:
            raise NotFound("org", f"no organization {name!r}")
        [row] = rows
        return Org(**row._mapping)

    return Query(found, read)


async def find_operator(conn: AsyncConnection) -> str | None:
    """The org whose audit log tells of what belongs to no org."""
    oldest = sa.select(sa.func.min(orgs.c.id)).where(orgs.c.is_operator)
    found: str | None = await conn.scalar(oldest)
    return found
