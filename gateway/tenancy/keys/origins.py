"""Keeps the web pages from which browsers may call: each organization's exact origins.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.db import tenant
from gateway.tenancy.changes import unchecked
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.restrictions import check_origins
from gateway.tenancy.orgs import Check, Org
from gateway.tenancy.tables import orgs

MAX_ORGS_WITH_ORIGINS = 20_000
"""Those of more, by age, are not known to browsers."""


async def update_origins(
    db: AsyncEngine,
    org_id: str,
    origins: Iterable[str] | None,
    *,
    actor: Actor,
    check: Check = unchecked,
) -> Org:
    """Replace the origins; `origins` None: as they are. Every worker goes by them within
    `auth.cors_origins.REFRESH_S` of the next question.

    Raises: InvalidField, NotFound, and what `check` raises.
    """
    wanted = None if origins is None else check_origins(origins)
    async with tenant(db, org_id) as conn:
        live = sa.select(orgs).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
        row = (await conn.execute(live.with_for_update(key_share=True))).one_or_none()
        if row is None:
            raise NotFound("org", f"no organization {org_id!r}")
        before = Org(**row._mapping)
        check(before)
        if wanted is None or wanted == before.cors_origins:
            return before
        changed = sa.update(orgs).where(orgs.c.id == org_id).values(cors_origins=wanted)
        made = (await conn.execute(changed.returning(orgs))).one()
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="organization.updated",
            target=org_id,
            before={"cors_origins": before.cors_origins},
            after={"cors_origins": wanted},
        )
        return Org(**made._mapping)


async def all_origins(conn: AsyncConnection) -> dict[str, frozenset[str]]:
    """Return the origins of all live organizations: origin -> the organizations that list it."""
    listed = sa.select(orgs.c.id, orgs.c.cors_origins)
    listed = listed.where(
        orgs.c.archived_at.is_(None), sa.func.cardinality(orgs.c.cors_origins) > 0
    )
    rows = await conn.execute(listed.order_by(orgs.c.id).limit(MAX_ORGS_WITH_ORIGINS))
    found: dict[str, set[str]] = {}
    for org_id, origins in rows:
        for origin in origins:
            found.setdefault(origin, set()).add(org_id)
    return {origin: frozenset(org_ids) for origin, org_ids in found.items()}
