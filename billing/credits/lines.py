"""Credit lines in Postgres: lease balances to gateways, pay usage, and close ended grants.

A transaction locks the org's line, so gateways that top up the same org wait for each other, but
not for ingestion, which adds usage to the table `unpaid_usage` (`ledger.POST_LEGS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.credits.balance_leases import (
    EXPIRY_MARGIN,
    LEASE_TTL,
    CreditLine,
    LeasePlan,
    LeaseRequest,
    plan,
)
from billing.credits.balance_watch import HAS_EXPIRED, watch
from billing.credits.grants import EXPIRY_GRACE, Grant, Usage
from billing.credits.top_ups import expire_top_ups
from billing.credits.unpaid_usage import PAYABLE, oldest_unpaid
from billing.ledger.accounts import account_of
from billing.ledger.spend_totals import hold_books
from billing.ledger.transfers import GRANT_PREFIX, Transfer, TransferStatus, transfer
from billing.money import Pico
from billing.tables import (
    TOTAL_PICO,
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
"""A sweep settles at most so many orgs."""


class SweepCursor(msgspec.Struct):
    """The last org of a sweep. The next sweep goes on behind it, and after the last org from the
    beginning, so that no org blocks the others."""

    org_id: str = ""


class Funding(msgspec.Struct, frozen=True, kw_only=True):
    """The amount that an org may spend in all, and how long that holds."""

    version: int
    funded_pico: Pico
    by_model: Mapping[str, Pico]
    """The amount that is added for requests to these models."""
    ttl_s: float
    """Seconds from before it was requested."""
    refill_pico: Pico
    """A top-up is due when less is left; 0: it would bring nothing."""
    refill_by_model: Mapping[str, Pico]
    """The same by model, where only grants for these models have more."""
    must_shrink: bool
    """True if a revoked or expired grant has a lease, which its holders should release."""


async def top_up(db: AsyncEngine, org_id: str, request: LeaseRequest) -> Funding:
    """Settle an org's line and renew its leases. `db`: of a role that sees every org's rows.

    Raises: SQLAlchemyError when Postgres is away.
    """
    async with db.begin() as conn:
        await open_line(conn, org_id)
        found = await _settle(conn, org_id, request, wait=True)
        assert found is not None, "a line that is open is not removed"
        made, grants, now = found
        await watch(conn, org_id, was_refused=made.is_short(grants, request))
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
    """Pay usage and close ended grants. Return False if another transaction does it."""
    async with db.begin() as conn:
        found = await _settle(conn, org_id, None, wait=False)
        if found is not None:
            await watch(conn, org_id)
    return found is not None


async def sweep(db: AsyncEngine, cursor: SweepCursor | None = None) -> int:
    """Expire top-ups, settle the next orgs that are due, and return how many."""
    cursor = cursor or SweepCursor()
    async with db.begin() as conn:
        await expire_top_ups(conn)
        due = list(await conn.scalars(_DUE, {"behind": cursor.org_id, "most": SWEEP_BATCH}))
    for org_id in due:
        cursor.org_id = org_id  # before it is settled, so that a failing org is skipped next time
        await settle(db, org_id)
    if len(due) < SWEEP_BATCH:
        cursor.org_id = ""
    return len(due)


_IS_DUE = f"""(
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
"""
_DUE = sa.text(f"""
    SELECT org_id FROM credit_lines l WHERE l.org_id > :behind AND {_IS_DUE}
    ORDER BY org_id LIMIT :most
""")
NEXT_DUE = f"""
    SELECT least((SELECT now() FROM credit_lines l WHERE {_IS_DUE} LIMIT 1),
        (SELECT min(leased_until) + interval '{EXPIRY_MARGIN.total_seconds()} seconds'
            FROM credit_lines),
        (SELECT min(expires_at) FROM top_ups WHERE state = 'requested'))
"""
"""SQL: the moment at which there is something to sweep next, or NULL."""


_OPEN_LINE = sa.text(f"""
    INSERT INTO credit_lines (org_id, paid_pico)
    SELECT :org_id, greatest(
        (SELECT coalesce(sum({TOTAL_PICO}), 0) FROM usage_daily WHERE org = :org_id),
        (SELECT coalesce(sum(amount_pico), 0) FROM transfers
            WHERE kind = 'credit' AND credit = :account))
    ON CONFLICT DO NOTHING
""")


async def open_line(conn: AsyncConnection, org_id: str) -> None:
    """Open a credit line unless the org has one. It pays later usage; earlier usage counts as paid.
    The books are locked meanwhile."""
    found = sa.select(credit_lines.c.org_id).where(credit_lines.c.org_id == org_id)
    if await conn.scalar(found) is None:
        await hold_books(conn)
        await conn.execute(_OPEN_LINE, {"org_id": org_id, "account": account_of(org_id)})


async def _settle(
    conn: AsyncConnection, org_id: str, request: LeaseRequest | None, *, wait: bool
) -> tuple[LeasePlan, dict[str, Grant], datetime] | None:
    """Bring a line into its next state; return that, the grants and the time. None: the line does
    not exist, or is locked and `wait` is False."""
    row = (await conn.execute(_LINE_WAITING if wait else _LINE, {"org_id": org_id})).one_or_none()
    if row is None:
        return None
    line = read_struct(CreditLine, row)
    now = (await conn.execute(sa.select(sa.func.clock_timestamp()))).scalar_one()
    grants = await open_grants(conn, org_id)
    leases = await _leases(conn, org_id)
    usages, events = await oldest_unpaid(conn, org_id, is_prepaid=line.is_prepaid)
    made = plan(line, grants, leases, usages, request, now)
    if request is None and not made.does_anything(usages):
        return made, {}, now
    if made.transfers:
        statuses = await transfer(conn, made.transfers)
        assert all(status is TransferStatus.CREATED for status in statuses), statuses
    await _write_burns(conn, made, events)
    await _write_owed(conn, org_id, usages, made.owed)
    await _write_line(conn, made, now)
    return made, {each.id: each for each in grants}, now


# An org that tenancy does not know is treated as prepaid.
_OF_LINE = """
    SELECT l.*, coalesce((SELECT prepaid FROM orgs WHERE id = l.org_id), true) AS is_prepaid
    FROM credit_lines l WHERE org_id = :org_id FOR UPDATE OF l
"""
_LINE_WAITING, _LINE = sa.text(_OF_LINE), sa.text(f"{_OF_LINE} SKIP LOCKED")


async def open_grants(conn: AsyncConnection, org_id: str) -> list[Grant]:
    """Return the grants that are not ended."""
    own = credit_grants.c
    left = balances.c.credits_pico - balances.c.debits_pico
    joined = sa.literal(GRANT_PREFIX) + own.id == balances.c.account
    found = sa.select(credit_grants, left.label("left_pico")).join(balances, joined)
    found = found.where(own.org_id == org_id, own.ended_at.is_(None))
    return [read_struct(Grant, row) for row in await conn.execute(found)]


async def _leases(conn: AsyncConnection, org_id: str) -> dict[str, Transfer]:
    own = credit_leases.c
    found = sa.select(own.grant_id, transfers).join(transfers, own.transfer_id == transfers.c.id)
    rows = await conn.execute(found.where(own.org_id == org_id))
    return {row.grant_id: read_struct(Transfer, row) for row in rows}


async def _write_burns(conn: AsyncConnection, made: LeasePlan, events: Mapping[str, str]) -> None:
    line = {"org_id": made.line.org_id, "version": made.line.version}
    rows = [
        {**msgspec.structs.asdict(each), **line, "event_id": events[each.transfer_id]}
        for each in made.burns
    ]
    if rows:
        await conn.execute(insert(credit_burns), rows)


async def _write_owed(
    conn: AsyncConnection, org_id: str, usages: Sequence[Usage], owed: Mapping[str, Pico]
) -> None:
    """Delete paid usage, and reduce what is paid in part."""
    own = unpaid_usage.c
    paid = [each.transfer_id for each in usages if each.transfer_id not in owed]
    if paid:
        gone = sa.delete(unpaid_usage).where(own.org_id == org_id, own.transfer_id.in_(paid))
        await conn.execute(gone)
    for each in usages:
        if 0 < owed.get(each.transfer_id, 0) < each.amount_pico:
            part = sa.update(unpaid_usage).where(own.transfer_id == each.transfer_id)
            await conn.execute(part.values(amount_pico=owed[each.transfer_id]))


async def _write_line(conn: AsyncConnection, made: LeasePlan, now: datetime) -> None:
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
