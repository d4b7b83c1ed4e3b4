"""Credits: what an org has paid in advance. Given and taken back by operators, kept in the ledger.

A prepaid org spends no more than that: what it may spend is leased from there (`limits.funding`),
and the ledger lets nobody lease more than there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.credits.balance import balance_of
from billing.credits.grants import DEFAULT_PRIORITY
from billing.credits.grants_admin import (
    Credit,
    count_open,
    find_credit,
    grant_credit,
    revoke_credit,
)
from billing.money import PICO_PER_USD, Pico, format_usd
from gateway.audit.log import Actor, record_for_both
from gateway.db import tenant
from gateway.ids import uuid7
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.money.spend_caps import MAX_AMOUNT_PICO, PICO_PER_NANO
from gateway.tenancy.tables import orgs

Check = Callable[[Credit], None]
"""Raises what keeps the credit, as it stands, from being changed."""
MAX_OPEN = 100
"""Credits of an org of which something is left."""


async def create_credit(
    db: AsyncEngine,
    *,
    org_id: str,
    amount_pico: Pico,
    priority: int = DEFAULT_PRIORITY,
    expires_at: datetime | None = None,
    models: Sequence[str] | None = None,
    components: Sequence[str] | None = None,
    operator_org: str,
    actor: Actor,
) -> Credit:
    """Create a credit; `db` sees the house's books. Raises: InvalidField, NotFound (a live org)."""
    if amount_pico <= 0 or amount_pico % PICO_PER_NANO:
        raise InvalidField("amount_usd", "must be more than nothing")
    async with tenant(db, org_id) as conn:
        await hold_org(conn, org_id)
        now = (await conn.execute(sa.select(sa.func.now()))).scalar_one()
        if expires_at is not None and expires_at <= now:
            raise InvalidField("expires_at", "must be in the future")
        return await add_credit(
            conn,
            org_id=org_id,
            credit_id=f"credit_{uuid7().hex}",
            amount_pico=amount_pico,
            priority=priority,
            expires_at=expires_at,
            models=models,
            components=components,
            operator_org=operator_org,
            actor=actor,
        )


async def add_credit(
    conn: AsyncConnection,
    *,
    org_id: str,
    credit_id: str,
    amount_pico: Pico,
    operator_org: str,
    actor: Actor,
    **terms: Any,
) -> Credit:
    """Add a credit in the transaction of a verb that holds the org.

    `terms`: as `grant_credit` has them.
    Raises: InvalidField.
    """
    before = await balance_of(conn, org_id)
    if before.credited_pico + amount_pico > MAX_AMOUNT_PICO:
        most = MAX_AMOUNT_PICO // PICO_PER_USD
        raise InvalidField("amount_usd", f"an organization has {most} USD of credit at most")
    if await count_open(conn, org_id) >= MAX_OPEN:
        raise InvalidField("org_id", f"it has {MAX_OPEN} credits with something left already")
    made = await grant_credit(
        conn, credit_id=credit_id, org=org_id, amount_pico=amount_pico, **terms
    )
    await _log(conn, made, "credit.created", operator_org, actor)
    return made


async def get_credit(conn: AsyncConnection, *, org_id: str, credit_id: str) -> Credit:
    """Raises: NotFound."""
    found = await find_credit(conn, org_id, credit_id)
    if found is None:
        raise NotFound("credit_id", f"no credit {credit_id!r}")
    return found


async def take_back_credit(
    db: AsyncEngine,
    credit_id: str,
    *,
    org_id: str,
    operator_org: str,
    actor: Actor,
    check: Check,
) -> Credit:
    """Take back what nobody has spent of it; what is leased just now follows when the lease ends.
    Idempotent.

    Raises: NotFound, and what `check` raises.
    """
    async with tenant(db, org_id) as conn:
        await hold_org(conn, org_id)
        found = await get_credit(conn, org_id=org_id, credit_id=credit_id)
        check(found)
        if found.revoked_at is not None:
            return found
        await revoke_credit(conn, org_id, credit_id)
        after = await get_credit(conn, org_id=org_id, credit_id=credit_id)
        await _log(conn, after, "credit.revoked", operator_org, actor)
        return after


async def hold_org(conn: AsyncConnection, org_id: str) -> None:
    """One change of its credit at a time. Raises: NotFound."""
    live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(key_share=True)) is None:
        raise NotFound("org_id", f"no organization {org_id!r}")


async def _log(
    conn: AsyncConnection, credit: Credit, action: str, operator_org: str, actor: Actor
) -> None:
    await record_for_both(
        conn,
        org_id=credit.org_id,
        operator_org=operator_org,
        actor=actor,
        action=action,
        target=credit.id,
        after={"amount_usd": format_usd(credit.amount_pico), "organization": credit.org_id},
    )
