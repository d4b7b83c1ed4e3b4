"""Organizations: who is billed. Above: `cli`, `bootstrap`, admin routes. Below: `tables`."""

from __future__ import annotations

from datetime import datetime

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.ids import uuid7
from gateway.tenancy.changes import EVERYTHING, changing
from gateway.tenancy.errors import NameTaken, NotFound
from gateway.tenancy.tables import MAX_PAGE, check_name, check_plan, orgs


class Org(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    plan: str | None
    is_operator: bool
    """It runs the installation."""
    cors_origins: list[str]
    """Of web pages whose browsers may call with its keys."""
    created_at: datetime
    archived_at: datetime | None


async def create_org(
    conn: AsyncConnection, *, name: str, plan: str | None = None, is_operator: bool = False
) -> Org:
    """is_operator: it runs the installation. Raises: InvalidField, NameTaken, NotFound (plan)."""
    row = {"id": f"org_{uuid7().hex}", "name": check_name(name), "is_operator": is_operator}
    added = insert(orgs).values(**row, plan=await check_plan(conn, plan))
    made = (await conn.execute(added.on_conflict_do_nothing().returning(orgs))).one_or_none()
    if made is None:
        raise NameTaken("name", f"there is an organization {name!r}")
    return Org(**made._mapping)


async def find_org(conn: AsyncConnection, *, name: str) -> Org:
    """A live organization by the name people know. Raises: NotFound."""
    found = sa.select(orgs).where(orgs.c.name == name, orgs.c.archived_at.is_(None))
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("org", f"no organization {name!r}")
    return Org(**row._mapping)


async def list_orgs(conn: AsyncConnection, *, after: str = "", archived: bool = False) -> list[Org]:
    """Up to MAX_PAGE organizations with ids above `after`, oldest first: the live ones, or with
    `archived` all."""
    listed = sa.select(orgs).where(orgs.c.id > after)
    if not archived:
        listed = listed.where(orgs.c.archived_at.is_(None))
    rows = await conn.execute(listed.order_by(orgs.c.id).limit(MAX_PAGE))
    return [Org(**row._mapping) for row in rows]


async def update_org_plan(db: AsyncEngine, redis: Redis, org_id: str, plan: str | None) -> None:
    """Raises: NotFound, ChangeNotAnnounced."""
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        changed = sa.update(orgs).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
        done = await conn.execute(changed.values(plan=await check_plan(conn, plan)))
        if done.rowcount == 0:
            raise NotFound("org", f"no organization {org_id!r}")


async def archive_org(db: AsyncEngine, redis: Redis, org_id: str) -> None:
    """Its keys stop working. Idempotent. Raises: NotFound, ChangeNotAnnounced."""
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        moment = sa.func.coalesce(orgs.c.archived_at, sa.func.now())
        done = await conn.execute(
            sa.update(orgs).where(orgs.c.id == org_id).values(archived_at=moment)
        )
        if done.rowcount == 0:
            raise NotFound("org", f"no organization {org_id!r}")
