"""Suspend an org for unpaid invoices. The suspension is derived from the states of its invoices, so
a payment or a credit note ends it.

An operator may lift it: then only an invoice that enters such a state later suspends again.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.states import SUSPENDED, SUSPENDING
from billing.invoices.tables import invoice_transitions, invoices

TOLD_FOR = timedelta(minutes=5)
"""A change is announced again for so long, for gateways that missed it."""


def suspended_by(
    org_id: sa.ColumnElement[str], lifted_at: sa.ColumnElement[datetime]
) -> sa.ScalarSelect[str]:
    """Return SQL of the number of the oldest invoice that suspends an org, or NULL."""
    own = invoices.c
    since_lifted = sa.or_(lifted_at.is_(None), own.state_since > lifted_at)
    found = sa.select(own.number).where(own.org_id == org_id, own.state.in_(SUSPENDING))
    oldest = found.where(since_lifted).order_by(own.period_start).limit(1)
    return oldest.correlate_except(invoices).scalar_subquery()


def suspended_since(org_id: str) -> sa.ScalarSelect[datetime]:
    """Return SQL of the time since when the newest invoice suspends an org, or NULL."""
    own = invoices.c
    newest = sa.select(sa.func.max(own.state_since))
    return newest.where(own.org_id == org_id, own.state.in_(SUSPENDING)).scalar_subquery()


async def has_changed(conn: AsyncConnection, now: datetime) -> bool:
    """Tell whether an invoice has suspended or reinstated an org in the last minutes."""
    own, entered = invoices.c, invoice_transitions.c
    found = sa.select(own.id).join(invoice_transitions, entered.invoice_id == own.id)
    found = found.where(entered.state == SUSPENDED, own.state_since > now - TOLD_FOR)
    return await conn.scalar(found.limit(1)) is not None
