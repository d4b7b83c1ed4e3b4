"""Read an org's balance from the books: its credits, what is left of them, and its receivable."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.accounts import account_of
from billing.money import Pico
from billing.queries import Query, ask
from billing.tables import balances, read_struct


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    credited_pico: Pico
    """The sum of all grants ever."""
    unpaid_pico: Pico
    """Usage that no grant has paid yet."""
    leased_pico: Pico
    available_pico: Pico
    """The rest of valid grants, without leases."""

    @property
    def left_pico(self) -> Pico:
        """The balance less unpaid usage; negative if the grants do not cover it."""
        return self.available_pico + self.leased_pico - self.unpaid_pico


BALANCE = """
    SELECT
        (SELECT coalesce(sum(amount_pico), 0) FROM credit_grants WHERE org_id = :org)
            AS credited_pico,
        (SELECT coalesce(sum(amount_pico), 0) FROM unpaid_usage WHERE org_id = :org) AS unpaid_pico,
        coalesce(sum(pending_debits_pico), 0) AS leased_pico,
        coalesce(sum(credits_pico - debits_pico - pending_debits_pico)
            FILTER (WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())), 0)
            AS available_pico
    FROM credit_grants g JOIN balances b ON b.account = 'grant:' || g.id
    WHERE g.org_id = :org AND g.ended_at IS NULL
"""
"""SQL: the fields of `Balance`, of `:org`."""
_BALANCE = sa.text(BALANCE).columns(
    *(
        sa.column(name, sa.Numeric)
        for name in ("credited_pico", "unpaid_pico", "leased_pico", "available_pico")
    )
)


async def balance_of(conn: AsyncConnection, org: str) -> Balance:
    return await ask(conn, balance_query(org))


def balance_query(org: str) -> Query[Balance]:
    return Query(_BALANCE.bindparams(org=org), lambda rows: read_struct(Balance, rows[0]))


async def owed_pico(conn: AsyncConnection, org: str) -> Pico:
    """Return the balance of the receivable: usage and invoice adjustments, less credit notes,
    credits and payments. Negative if the org has paid more than it owes."""
    return await ask(conn, owed_query(org))


def owed_query(org: str) -> Query[Pico]:
    own = balances.c
    owed = (own.debits_pico - own.credits_pico).label("owed_pico")
    found = sa.select(owed).where(own.account == account_of(org))
    return Query(found, lambda rows: int(rows[0].owed_pico) if rows else 0)
