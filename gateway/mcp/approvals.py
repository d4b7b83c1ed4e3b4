"""Keeps calls that wait for a person in Postgres, each change with its entry in the audit log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.db import tenant
from gateway.mcp.call_arguments import FORGOTTEN, CallArguments
from gateway.mcp.tables import approvals as table
from mcp_bridge.trust.approvals import Approval, ApprovalEvent, ApprovalTransition, Decider

OPEN = ("pending", "approved")
_ONE_AT_A_TIME = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
DECIDES: Decider = "administrator"
MAX_LISTED = 1_000
BRIDGE = "mcp"


class PostgresApprovals:
    """An ApprovalStore in Postgres. `decider`: in whose name decisions are recorded. `shown`: seals
    the arguments for who decides; None: nobody is shown them."""

    def __init__(
        self, db: AsyncEngine, decider: Actor | None = None, shown: CallArguments | None = None
    ) -> None:
        self._db, self._decider, self._shown = db, decider, shown

    async def insert(
        self,
        org_id: str,
        new: ApprovalTransition,
        *,
        max_pending: int,
        arguments: bytes | None = None,
    ) -> Approval | None:
        """Add a call that waits; None: too many do. A few more than `max_pending` can wait if they
        are added at the same time."""
        waiting = sa.select(sa.func.count()).where(
            table.c.org_id == org_id,
            table.c.state == "pending",
            table.c.expires_at_s > new.approval.requested_at_s,
        )
        key, now_s = new.approval.call.key(), new.approval.requested_at_s
        async with tenant(self._db, org_id) as conn:
            await conn.execute(_ONE_AT_A_TIME, {"name": f"approval {org_id} {key}"})
            body = await conn.scalar(_waiting(org_id, key, now_s))
            if body is not None:
                return to_approval(body)
            if (await conn.scalar(waiting) or 0) >= max_pending:
                return None
            row = {"org_id": org_id, "id": new.approval.id, **fields_of(new.approval)}
            if arguments is not None and self._shown is not None:
                row |= self._shown.seal(new.approval, arguments)
            await conn.execute(sa.insert(table).values(**row))
            await self._record(conn, org_id, new.event)
        return new.approval

    async def get(self, org_id: str, approval_id: str) -> Approval | None:
        asked = sa.select(table.c.body).where(table.c.org_id == org_id, table.c.id == approval_id)
        async with tenant(self._db, org_id) as conn:
            body = await conn.scalar(asked)
        return None if body is None else to_approval(body)

    async def arguments(self, org_id: str, approval_id: str, now_s: float) -> bytes | None:
        """Return the arguments of a call that waits, as JSON; None: none are kept."""
        asked = sa.select(table.c.body, table.c.arguments, table.c.secret_id).where(
            table.c.org_id == org_id,
            table.c.id == approval_id,
            table.c.arguments.is_not(None),
            table.c.expires_at_s > now_s,
        )
        async with tenant(self._db, org_id) as conn:
            row = (await conn.execute(asked)).one_or_none()
        if row is None or self._shown is None:
            return None
        return self._shown.open(to_approval(row.body), row)

    async def waiting(self, org_id: str, key: str, now_s: float) -> Approval | None:
        async with tenant(self._db, org_id) as conn:
            body = await conn.scalar(_waiting(org_id, key, now_s))
        return None if body is None else to_approval(body)

    async def replace(self, org_id: str, before: Approval, after: ApprovalTransition) -> bool:
        decided = {} if after.approval.state == "pending" else FORGOTTEN
        changed = (
            sa.update(table)
            .where(table.c.org_id == org_id, table.c.id == before.id)
            .where(table.c.body == fields_of(before)["body"])
            .values(**fields_of(after.approval), **decided)
        )
        async with tenant(self._db, org_id) as conn:
            if (await conn.execute(changed)).rowcount != 1:
                return False
            await self._record(conn, org_id, after.event)
        return True

    async def _record(self, conn: AsyncConnection, org_id: str, event: ApprovalEvent) -> None:
        by_caller = event.actor in ("", event.call.caller)
        actor = Actor(kind="system", id=BRIDGE if by_caller else event.actor)
        if self._decider is not None and event.event == "approval.decided":
            actor = self._decider
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action=f"mcp.{event.event}",
            target=event.approval_id,
            after={"state": event.state, **msgspec.to_builtins(event.call)},
        )


def _waiting(org_id: str, key: str, now_s: float) -> sa.Select[Any]:
    state = table.c.state
    decider = sa.func.coalesce(sa.cast(table.c.body, JSONB)["call"]["decider"].astext, DECIDES)
    stands = sa.or_(state.in_(OPEN), sa.and_(state == "denied", decider == DECIDES))
    return (
        sa.select(table.c.body)
        .where(table.c.org_id == org_id, table.c.call_key == key)
        .where(table.c.expires_at_s > now_s, stands)
        .order_by(sa.case((state == "approved", 0), (state == "pending", 1), else_=2), table.c.id)
        .limit(1)
    )


def select_approvals(org_id: str, state: str | None) -> sa.Select[tuple[str]]:
    """Select approvals for a page of them; `to_approval` reads the rows."""
    asked = sa.select(table.c.body).where(table.c.org_id == org_id)
    return asked if state is None else asked.where(table.c.state == state)


async def list_approvals(conn: AsyncConnection, *, org_id: str, after: str = "") -> list[Approval]:
    """Return up to MAX_LISTED that wait, or wait to be used, with ids above `after`, oldest
    first."""
    asked = (
        sa.select(table.c.body)
        .where(table.c.org_id == org_id, table.c.state.in_(OPEN), table.c.id > after)
        .order_by(table.c.id)
        .limit(MAX_LISTED)
    )
    return [to_approval(row.body) for row in await conn.execute(asked)]


def fields_of(approval: Approval) -> dict[str, object]:
    return {
        "call_key": approval.call.key(),
        "state": approval.state,
        "expires_at_s": approval.expires_at_s,
        "body": msgspec.json.encode(approval).decode(),
    }


def to_approval(body: str) -> Approval:
    return msgspec.json.decode(body, type=Approval)


# ---- of all orgs: how many wait, and the outbox of webhooks


async def count_waiting(db: AsyncEngine, now_s: float) -> dict[str, int]:
    """Return how many calls of each server wait for a person. `db`: of a role that sees all orgs.
    Raises: DATABASE_ERRORS."""
    server = sa.cast(table.c.body, JSONB)["call"]["server"].astext.label("server")
    asked = (
        sa.select(server, sa.func.count().label("number"))
        .where(table.c.state == "pending", table.c.expires_at_s > now_s)
        .group_by(server)
    )
    async with db.connect() as conn:
        return {row.server: row.number for row in await conn.execute(asked)}


async def undispatched(conn: AsyncConnection, limit: int) -> list[Approval]:
    """Return the oldest that nobody was told of, for the caller to mark in this transaction."""
    found = (
        sa.select(table.c.body)
        .where(table.c.dispatched_at.is_(None))
        .order_by(table.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return [to_approval(row.body) for row in await conn.execute(found)]


async def mark_dispatched(conn: AsyncConnection, approval_ids: Iterable[str]) -> None:
    told = sa.update(table).where(table.c.id.in_(list(approval_ids)))
    await conn.execute(told.values(dispatched_at=sa.func.now()))
