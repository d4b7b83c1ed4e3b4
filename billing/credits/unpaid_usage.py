"""Find usage that no credit has paid yet, and that one could pay.

What no credit pays for now, such as usage of a model for which there is none, is not even looked
at: however much of it waits, what can be paid does not wait behind it.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.grants import UNKNOWN, Usage
from billing.events import COMPONENTS
from billing.ledger.transfers import GRANT_PREFIX
from billing.money import Pico
from billing.tables import AMOUNTS, amount_column

MAX_AT_ONCE = 2000
"""Transfers of usage that are paid in one transaction."""
_COMPONENTS = " OR ".join(
    f"(e.{amount_column(name)} > 0 AND '{name}' = ANY(g.components))" for name in COMPONENTS
)
PAYABLE = f"""EXISTS (
    SELECT FROM credit_grants g JOIN balances b ON b.account = '{GRANT_PREFIX}' || g.id
    WHERE g.org_id = u.org_id AND g.ended_at IS NULL AND b.credits_pico > b.debits_pico
        AND (g.models IS NULL OR e.model = ANY(g.models))
        AND (g.expires_at IS NULL OR e.admitted_at < g.expires_at)
        AND (g.components IS NULL
            OR (({_COMPONENTS}) AND {" + ".join(f"e.{name}" for name in AMOUNTS)} = u.amount_pico)))
"""
"""SQL: that a credit pays something of a row `u` of unpaid_usage, whose event is `e`."""
_OLDEST = """
    SELECT u.transfer_id, u.amount_pico AS owed_pico, e.* FROM unpaid_usage u
    JOIN usage_events e ON e.id = u.event_id
    WHERE u.org_id = :org_id AND {wanted} ORDER BY u.transfer_id LIMIT :most
"""
_ALL, _PAYABLE = (sa.text(_OLDEST.format(wanted=wanted)) for wanted in ("true", PAYABLE))


async def oldest_unpaid(
    conn: AsyncConnection, org_id: str, *, is_prepaid: bool
) -> tuple[list[Usage], dict[str, str]]:
    """At most MAX_AT_ONCE, and the event of each. What a prepaid org has no credit for waits; what
    another one has none for is on its invoices."""
    query = _PAYABLE if is_prepaid else _ALL
    rows = (await conn.execute(query, {"org_id": org_id, "most": MAX_AT_ONCE})).all()
    usages = [_to_usage(row._mapping) for row in rows]
    return usages, {row.transfer_id: row.id for row in rows}


def _to_usage(row: sa.RowMapping) -> Usage:
    amounts: dict[str, Pico] = {
        component: int(row[amount_column(component)])
        for component in COMPONENTS
        if row[amount_column(component)]
    }
    owed = int(row["owed_pico"])
    return Usage(
        transfer_id=row["transfer_id"],
        model=row["model"],
        admitted_at=row["admitted_at"],
        amounts=amounts if sum(amounts.values()) == owed else {UNKNOWN: owed},
    )
