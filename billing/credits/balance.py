"""Read an org's balance: what it was credited, what is left of it and what it owes, as the books
have it.

Knows no lease of its own: what is leased is left until it is spent. `read_spend` says what usage
cost: the receivable has the sums of all that was ever posted, reversals, adjustments and roundings
among them.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.accounts import account_of
from billing.money import Pico
from billing.tables import balances


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    credited_pico: Pico
    """In all, ever."""
    unpaid_pico: Pico
    """Usage that grants are yet to pay, or would if they had enough."""
    leased_pico: Pico
    available_pico: Pico
    """Neither paid, nor leased, nor expired."""

    @property
    def left_pico(self) -> Pico:
        """When what is spent is paid; less than nothing where nothing pays for it."""
        return self.available_pico + self.leased_pico - self.unpaid_pico


_BALANCE = sa.text("""
    SELECT
        (SELECT coalesce(sum(amount_pico), 0) FROM credit_grants WHERE org_id = :org) AS credited,
        (SELECT coalesce(sum(amount_pico), 0) FROM unpaid_usage WHERE org_id = :org) AS unpaid,
        coalesce(sum(pending_debits_pico), 0) AS leased,
        coalesce(sum(credits_pico - debits_pico - pending_debits_pico)
            FILTER (WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())), 0)
            AS available
    FROM credit_grants g JOIN balances b ON b.account = 'grant:' || g.id
    WHERE g.org_id = :org AND g.ended_at IS NULL
""")


async def balance_of(conn: AsyncConnection, org: str) -> Balance:
    row = (await conn.execute(_BALANCE, {"org": org})).one()
    return Balance(
        credited_pico=int(row.credited),
        unpaid_pico=int(row.unpaid),
        leased_pico=int(row.leased),
        available_pico=int(row.available),
    )


async def owed_pico(conn: AsyncConnection, org: str) -> Pico:
    """Its receivable: usage and what invoices have added, less credit notes, credits and payments.
    Less than nothing: it has paid more than it owes."""
    own = balances.c
    found = sa.select(own.debits_pico - own.credits_pico).where(own.account == account_of(org))
    return int(await conn.scalar(found) or 0)
