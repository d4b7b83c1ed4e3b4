"""An org's credit in Postgres: topping up its leases, paying for its usage, giving back what ended.

Each org's line is held while it changes, so gateways that top up the same one wait for each other,
and none of them waits for who ingests. Usage comes here by `unpaid_usage`, which `ledger.POST_LEGS`
fills in the statement that books it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.credits.balance_leases import (
    EXPIRY_MARGIN,
    LEASE_TTL,
    Ask,
    CreditLine,
    LeasePlan,
    plan,
)
from billing.credits.balance_watch import HAS_EXPIRED, watch
from billing.credits.grants import EXPIRY_GRACE, Burn, Grant, Usage
from billing.credits.top_ups import expire_top_ups
from billing.credits.unpaid_usage import PAYABLE, oldest_unpaid
from billing.ledger.accounts import account_of
from billing.ledger.spend_totals import hold_books
from billing.ledger.transfers import Transfer, TransferStatus, transfer
from billing.money import Pico
from billing.tables import (
    AMOUNTS,
    balances,
    credit_burns,
    credit_grants,
    credit_leases,
    credit_lines,
    read_struct,
    transfers,
    unpaid_usage,
)

SWEEP_BATCH = 100
"""Orgs in one look."""


class Turn(msgspec.Struct):
    """The org that a sweep ended with: the next sweep goes on behind it, and from the beginning
    after the last, so that an org that is never done keeps no other waiting."""

    org_id: str = ""


class Funding(msgspec.Struct, frozen=True, kw_only=True):
    """The sum that an org may have spent in all, and until when that may be relied upon."""

    version: int
    funded_pico: Pico
    by_model: Mapping[str, Pico]
    """Beyond that, of requests to these models."""
    ttl_s: float
    """From before it was asked for."""
    refill_pico: Pico
    """When less is left, it is time to ask again; 0: there is no more."""
    refill_by_model: Mapping[str, Pico]
    """The same of requests to these models, of which there is more than of others."""
    must_shrink: bool
    """Of a grant that is over something is leased still: who lets go of it asks again."""


async def top_up(db: AsyncEngine, org_id: str, ask: Ask) -> Funding:
    """`db`: of a role that sees every org's rows. Raises: what SQLAlchemy raises where Postgres is
    away."""
    async with db.begin() as conn:
        await open_line(conn, org_id)
        found = await _settle(conn, org_id, ask, wait=True)
        assert found is not None, "a line that is open is not removed"
        made, grants, now = found
        await watch(conn, org_id, was_refused=made.is_short(grants, ask))
    funded, by_model = made.funded_pico(grants)
    until = made.line.leased_until
    return Funding(
        version=made.line.version,
        funded_pico=funded,
        by_model=by_model,
        ttl_s=(LEASE_TTL if until is None else until - now).total_seconds(),
        refill_pico=made.refill_pico,
        refill_by_model=made.refill_by_model,
        must_shrink=made.must_shrink,
    )


async def settle(db: AsyncEngine, org_id: str) -> bool:
    """Pay for what was used, give back what has ended. False: somebody else is at it."""
    async with db.begin() as conn:
        found = await _settle(conn, org_id, None, wait=False)
        if found is not None:
            await watch(conn, org_id)
    return found is not None


async def sweep(db: AsyncEngine, turn: Turn | None = None) -> int:
    """Settle the next orgs that have something to settle; returns how many it found. What waits for
    its top-up too long does not wait any more."""
    turn = turn or Turn()
    async with db.begin() as conn:
        await expire_top_ups(conn)
        due = list(await conn.scalars(_DUE, {"behind": turn.org_id, "most": SWEEP_BATCH}))
    for org_id in due:
        turn.org_id = org_id  # before it is tried: who fails has had their turn
        await settle(db, org_id)
    if len(due) < SWEEP_BATCH:
        turn.org_id = ""
    return len(due)


_DUE = sa.text(f"""
    SELECT org_id FROM credit_lines l
    WHERE l.org_id > :behind AND (
        l.leased_until < now() - interval '{EXPIRY_MARGIN.total_seconds()} seconds'
        OR EXISTS (
            SELECT FROM unpaid_usage u WHERE u.org_id = l.org_id AND (
                NOT coalesce((SELECT prepaid FROM orgs o WHERE o.id = l.org_id), true)
                OR EXISTS (SELECT FROM usage_events e WHERE e.id = u.event_id AND {PAYABLE})))
        OR EXISTS (
            SELECT FROM credit_grants g
            WHERE g.org_id = l.org_id AND g.ended_at IS NULL AND (
                (g.revoked_at IS NOT NULL AND g.id NOT IN (SELECT grant_id FROM credit_leases))
                OR g.expires_at < now() - interval '{EXPIRY_GRACE.total_seconds()} seconds'))
        OR {HAS_EXPIRED})
    ORDER BY org_id LIMIT :most
""")


_OPEN_LINE = sa.text(f"""
    INSERT INTO credit_lines (org_id, paid_pico)
    SELECT :org_id, greatest(
        (SELECT coalesce(sum({" + ".join(AMOUNTS)}), 0) FROM usage_daily WHERE org = :org_id),
        (SELECT coalesce(sum(amount_pico), 0) FROM transfers
            WHERE kind = 'credit' AND credit = :account))
    ON CONFLICT DO NOTHING
""")


async def open_line(conn: AsyncConnection, org_id: str) -> None:
    """From now on what the org uses is paid from its credit; what it owed before is on an invoice,
    or was credited to it directly. Nobody books while it begins."""
    found = sa.select(credit_lines.c.org_id).where(credit_lines.c.org_id == org_id)
    if await conn.scalar(found) is None:
        await hold_books(conn)
        await conn.execute(_OPEN_LINE, {"org_id": org_id, "account": account_of(org_id)})


async def _settle(
    conn: AsyncConnection, org_id: str, ask: Ask | None, *, wait: bool
) -> tuple[LeasePlan, dict[str, Grant], datetime] | None:
    """The line's next state, and the moment it is of."""
    line = await _hold_line(conn, org_id, wait)
    if line is None:
        return None
    now = (await conn.execute(sa.select(sa.func.clock_timestamp()))).scalar_one()
    grants = await open_grants(conn, org_id)
    leases = await _leases(conn, org_id)
    usages, events = await oldest_unpaid(conn, org_id, is_prepaid=line.is_prepaid)
    made = plan(line, grants, leases, usages, ask, now)
    if ask is None and not made.does_anything(usages):
        return made, {}, now
    if made.transfers:
        statuses = await transfer(conn, made.transfers)
        assert all(status is TransferStatus.CREATED for status in statuses), statuses
    await _keep_burns(conn, made, events)
    await _keep_owed(conn, org_id, usages, made.owed)
    await _keep_line(conn, made, now)
    return made, {each.id: each for each in grants}, now


async def _hold_line(conn: AsyncConnection, org_id: str, wait: bool) -> CreditLine | None:
    found = await conn.execute(_LINE_WAITING if wait else _LINE, {"org_id": org_id})
    row = found.one_or_none()
    if row is None:
        return None
    return CreditLine(
        org_id=org_id,
        version=row.version,
        told=row.told,
        paid_pico=int(row.paid_pico),
        is_prepaid=row.is_prepaid,
        leased_until=row.leased_until,
        leased_at=row.leased_at,
        spent_pico=int(row.spent_pico),
    )


# Whether an org is prepaid stands with the tenants; usage of one that is not known there is held.
_OF_LINE = """
    SELECT l.*, coalesce((SELECT prepaid FROM orgs WHERE id = l.org_id), true) AS is_prepaid
    FROM credit_lines l WHERE org_id = :org_id FOR UPDATE OF l
"""
_LINE_WAITING, _LINE = sa.text(_OF_LINE), sa.text(f"{_OF_LINE} SKIP LOCKED")


async def open_grants(conn: AsyncConnection, org_id: str) -> list[Grant]:
    """Those that have, or may have, something left."""
    own = credit_grants.c
    left = balances.c.credits_pico - balances.c.debits_pico
    joined = sa.literal("grant:") + own.id == balances.c.account
    found = sa.select(credit_grants, left.label("left_pico")).join(balances, joined)
    found = found.where(own.org_id == org_id, own.ended_at.is_(None))
    return [to_grant(row) for row in await conn.execute(found)]


def to_grant(row: sa.Row[Any]) -> Grant:
    fields = row._mapping
    return Grant(
        id=fields["id"],
        left_pico=int(fields["left_pico"]),
        priority=fields["priority"],
        expires_at=fields["expires_at"],
        models=_named(fields["models"]),
        components=_named(fields["components"]),
        created_at=fields["created_at"],
        revoked_at=fields["revoked_at"],
    )


def _named(found: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if found is None else tuple(found)


async def _leases(conn: AsyncConnection, org_id: str) -> dict[str, Transfer]:
    own = credit_leases.c
    found = sa.select(own.grant_id, transfers).join(transfers, own.transfer_id == transfers.c.id)
    rows = await conn.execute(found.where(own.org_id == org_id))
    return {row.grant_id: read_struct(Transfer, row) for row in rows}


async def _keep_burns(conn: AsyncConnection, made: LeasePlan, events: Mapping[str, str]) -> None:
    if made.burns:
        await conn.execute(
            insert(credit_burns), [_to_row(each, made, events) for each in made.burns]
        )


def _to_row(one: Burn, made: LeasePlan, events: Mapping[str, str]) -> dict[str, Any]:
    return {
        "transfer_id": one.transfer_id,
        "grant_id": one.grant_id,
        "org_id": made.line.org_id,
        "event_id": events[one.transfer_id],
        "version": made.line.version,
        "amount_pico": one.amount_pico,
    }


async def _keep_owed(
    conn: AsyncConnection, org_id: str, usages: Sequence[Usage], owed: Mapping[str, Pico]
) -> None:
    """Delete what is paid, and keep of the rest what is missing."""
    own = unpaid_usage.c
    paid = [each.transfer_id for each in usages if each.transfer_id not in owed]
    if paid:
        gone = sa.delete(unpaid_usage).where(own.org_id == org_id, own.transfer_id.in_(paid))
        await conn.execute(gone)
    for each in usages:
        if 0 < owed.get(each.transfer_id, 0) < each.amount_pico:
            part = sa.update(unpaid_usage).where(own.transfer_id == each.transfer_id)
            await conn.execute(part.values(amount_pico=owed[each.transfer_id]))


async def _keep_line(conn: AsyncConnection, made: LeasePlan, now: datetime) -> None:
    line, own = made.line, credit_leases.c
    kept = {each.id for each in made.leases.values()}
    gone = sa.delete(credit_leases).where(own.org_id == line.org_id, own.transfer_id.notin_(kept))
    await conn.execute(gone)
    rows = [
        {"grant_id": grant_id, "org_id": line.org_id, "transfer_id": lease.id}
        for grant_id, lease in made.leases.items()
    ]
    if rows:
        await conn.execute(insert(credit_leases).on_conflict_do_nothing(), rows)
    if made.ended:
        over = sa.update(credit_grants).where(credit_grants.c.id.in_(made.ended))
        await conn.execute(over.values(ended_at=now))
    values = {
        name: getattr(line, name)
        for name in ("version", "told", "paid_pico", "leased_until", "leased_at", "spent_pico")
    }
    changed = sa.update(credit_lines).where(credit_lines.c.org_id == line.org_id)
    await conn.execute(changed.values(**values))
