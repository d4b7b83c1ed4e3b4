"""Move the payments of credits for an event whose cost has changed: they pay for the event as it is
rated now, and the rest goes back to the credits.

    before 100, of which the credits paid 70, an invoice 30
    after  120: 70 and 30 stay paid, 20 are owed
    after   80: 70 and 10 stay paid; the next invoice gives 20 back
    after   50: 50 stay paid; the credits get 20 back, the next invoice gives 30 back

A credit that had ended is opened again, and ends with the next settlement if it is revoked or
expired. Knows no price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.balance_leases import account
from billing.credits.balance_watch import watch
from billing.credits.grants import Grant, Usage, burn
from billing.ledger.accounts import account_of
from billing.ledger.transfers import GOOD, Transfer, transfer
from billing.money import Pico
from billing.tables import credit_burns, credit_grants, credit_lines, read_struct, unpaid_usage


class RepricedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event whose cost changed, its new transfer, and the reversals of the old ones."""

    event_id: str
    model: str
    admitted_at: datetime
    before_pico: Pico
    reversals: Mapping[str, str]
    """The reversals by the transfers that they reverse."""
    transfer_id: str
    """The transfer of the new cost."""
    amounts: Mapping[str, Pico]
    """The new cost by component."""


class CreditShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a repriced event's cost that credits pay, and what they get back."""

    burns: dict[str, Pico]
    """Payments of the new transfer by credit."""
    returned: dict[str, Pico]
    """The amounts that credits get back."""
    owed_pico: Pico
    """The unpaid part of the new cost."""


def split_credit(
    grants: Sequence[Grant], burned: Mapping[str, Pico], unpaid_pico: Pico, event: RepricedEvent
) -> CreditShare:
    """Split the payments of credits between the new cost and what they get back. `burned`: the
    payments of the old cost by credit. `unpaid_pico`: the unpaid part of the old cost; what remains
    of it was invoiced and counts as paid."""
    paying = [
        msgspec.structs.replace(grant, left_pico=burned[grant.id])
        for grant in grants
        if burned.get(grant.id)
    ]
    usage = Usage(
        transfer_id=event.transfer_id,
        model=event.model,
        admitted_at=event.admitted_at,
        amounts=event.amounts,
    )
    burns = {each.grant_id: each.amount_pico for each in burn(paying, [usage])}
    invoiced = event.before_pico - sum(burned.values()) - unpaid_pico
    owed = usage.amount_pico - sum(burns.values()) - max(0, invoiced)
    back = {name: amount - burns.get(name, 0) for name, amount in burned.items()}
    return CreditShare(
        burns=burns,
        returned={name: amount for name, amount in back.items() if amount},
        owed_pico=max(0, owed),
    )


async def move_payments(
    conn: AsyncConnection, org_id: str, version: int, repriced: Sequence[RepricedEvent]
) -> None:
    """Move payments to the new transfers, in the transaction that has posted them. `version`: of
    the org's line, which the caller has locked."""
    if not repriced:
        return
    reversed_ids = [name for each in repriced for name in each.reversals]
    burned = await _burned(conn, reversed_ids)
    unpaid = await _delete_unpaid(conn, org_id, reversed_ids)
    grants = await _grants(conn, {name for by_grant in burned.values() for name in by_grant})
    version, paid, back = version + 1, 0, dict[str, Pico]()
    rows: list[dict[str, Any]] = []
    for each in repriced:
        of_event = _added([burned.get(name, {}) for name in each.reversals])
        missing = sum(unpaid.get(name, 0) for name in each.reversals)
        found = split_credit(grants, of_event, missing, each)
        same = {"org_id": org_id, "event_id": each.event_id, "version": version}
        for name, reversal in each.reversals.items():
            for grant_id, amount in burned.get(name, {}).items():
                taken = {"transfer_id": reversal, "grant_id": grant_id, "amount_pico": -amount}
                rows.append(same | taken)
        for grant_id, amount in found.burns.items():
            kept = {"transfer_id": each.transfer_id, "grant_id": grant_id, "amount_pico": amount}
            rows.append(same | kept)
        back = _added([back, found.returned])
        after = sum(each.amounts.values())
        paid += (after - found.owed_pico) - (each.before_pico - missing)
        await _write_owed(conn, each.transfer_id, after, found.owed_pico)
    if rows:
        await conn.execute(insert(credit_burns), rows)
    await _give_back(conn, org_id, version, back)
    own = credit_lines.c
    changed = sa.update(credit_lines).where(own.org_id == org_id)
    await conn.execute(changed.values(version=version, paid_pico=own.paid_pico + paid))
    await watch(conn, org_id)


def _added(sums: Sequence[Mapping[str, Pico]]) -> dict[str, Pico]:
    total: dict[str, Pico] = {}
    for each in sums:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + amount
    return total


async def _burned(conn: AsyncConnection, transfer_ids: Sequence[str]) -> dict[str, dict[str, Pico]]:
    """Return the payments of transfers, by transfer and credit."""
    own = credit_burns.c
    query = (
        sa.select(own.transfer_id, own.grant_id, sa.func.sum(own.amount_pico))
        .where(own.transfer_id.in_(transfer_ids))
        .group_by(own.transfer_id, own.grant_id)
    )
    found: dict[str, dict[str, Pico]] = {}
    for transfer_id, grant_id, amount in await conn.execute(query):
        found.setdefault(transfer_id, {})[grant_id] = int(amount)
    return found


async def _delete_unpaid(
    conn: AsyncConnection, org_id: str, transfer_ids: Sequence[str]
) -> dict[str, Pico]:
    """Delete the unpaid rows of reversed transfers, and return their amounts."""
    own = unpaid_usage.c
    gone = sa.delete(unpaid_usage).where(own.org_id == org_id, own.transfer_id.in_(transfer_ids))
    rows = await conn.execute(gone.returning(own.transfer_id, own.amount_pico))
    return {transfer_id: int(amount) for transfer_id, amount in rows}


async def _grants(conn: AsyncConnection, ids: set[str]) -> list[Grant]:
    """Return the grants of these ids, ended ones too; their `left_pico` is not read."""
    found = sa.select(credit_grants).where(credit_grants.c.id.in_(ids))
    return [read_struct(Grant, row, left_pico=0) for row in await conn.execute(found)]


async def _write_owed(conn: AsyncConnection, transfer_id: str, whole: Pico, owed: Pico) -> None:
    """Correct the row that `ledger.POST_LEGS` has written for the whole amount."""
    if owed == whole:
        return
    mine = unpaid_usage.c.transfer_id == transfer_id
    if owed:
        await conn.execute(sa.update(unpaid_usage).where(mine).values(amount_pico=owed))
    else:
        await conn.execute(sa.delete(unpaid_usage).where(mine))


async def _give_back(
    conn: AsyncConnection, org_id: str, version: int, back: Mapping[str, Pico]
) -> None:
    if not back:
        return
    wanted = [
        Transfer(
            id=f"returned:{org_id}:{version}:{grant_id}",
            debit=account_of(org_id),
            credit=account(grant_id),
            amount_pico=amount,
            kind="returned",
        )
        for grant_id, amount in sorted(back.items())
    ]
    statuses = await transfer(conn, wanted)
    assert all(status in GOOD for status in statuses), statuses
    own = credit_grants.c
    reopened = sa.update(credit_grants).where(own.id.in_(list(back)), own.ended_at.is_not(None))
    await conn.execute(reopened.values(ended_at=None))
