"""What an org was credited, what of it is spent, and what is left, as the books have it.

Above: `credits`, `balance_watch`, the gateway's administration. Below: Postgres. Knows no lease of
its own: what is leased is left until it is spent.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.money import Pico


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    credited_pico: Pico
    """In all, ever."""
    spent_pico: Pico
    """In all, ever, as far as the books have it."""
    unpaid_pico: Pico
    """Of it, what no grant has paid yet."""
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
        (SELECT coalesce(sum(debits_pico), 0) FROM balances WHERE account = 'receivable:' || :org)
            AS spent,
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
        spent_pico=int(row.spent),
        unpaid_pico=int(row.unpaid),
        leased_pico=int(row.leased),
        available_pico=int(row.available),
    )
