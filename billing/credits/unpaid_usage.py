"""Find unpaid usage that a credit can pay.

Usage that no credit can pay, such as that of a model without one, is not read at all, so that it
does not delay other usage however much of it there is.
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
"""One transaction pays at most so many transfers."""
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
"""SQL: true if a credit can pay a part of a row `u` of unpaid_usage, whose event is `e`."""
_OLDEST = """
    SELECT u.transfer_id, u.amount_pico AS owed_pico, e.* FROM unpaid_usage u
    JOIN usage_events e ON e.id = u.event_id
    WHERE u.org_id = :org_id AND {wanted} ORDER BY u.transfer_id LIMIT :most
"""
_ALL, _PAYABLE = (sa.text(_OLDEST.format(wanted=wanted)) for wanted in ("true", PAYABLE))


async def oldest_unpaid(
    conn: AsyncConnection, org_id: str, *, is_prepaid: bool
) -> tuple[list[Usage], dict[str, str]]:
    """Return at most MAX_AT_ONCE transfers and the event of each. Usage of a prepaid org without a
    credit that can pay it is left out; other orgs get an invoice for it."""
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
