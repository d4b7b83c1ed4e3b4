"""The outbox of invoices: changes of their states whose webhooks are not written yet."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.states import State
from billing.invoices.tables import invoice_transitions, invoices
from billing.tables import read_struct


class StateEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    invoice_id: str
    state: State
    occurred_at: datetime
    number: str | None
    currency: str
    total_coins: int | None
    due_at: datetime | None


async def undispatched(conn: AsyncConnection, limit: int) -> list[StateEntry]:
    """Return and lock the oldest changes that are not dispatched."""
    own, of = invoice_transitions.c, invoices.c
    waiting = (
        sa.select(invoice_transitions, of.number, of.currency, of.total_coins, of.due_at)
        .join(invoices, of.id == own.invoice_id)
        .where(own.dispatched_at.is_(None))
        .order_by(own.occurred_at, own.id)
        .limit(limit)
        .with_for_update(of=invoice_transitions, skip_locked=True)
    )
    return [read_struct(StateEntry, row) for row in await conn.execute(waiting)]


async def mark_dispatched(conn: AsyncConnection, ids: Sequence[str]) -> None:
    done = sa.update(invoice_transitions).where(invoice_transitions.c.id.in_(ids))
    await conn.execute(done.values(dispatched_at=sa.func.now()))
