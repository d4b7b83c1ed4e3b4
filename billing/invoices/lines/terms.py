"""Charge the terms of a whole period: `adjustments` of its usage.

The terms are those of the price list of the org's plan, as they were in force when the period
began. They apply to usage of the period itself; late usage and corrections are charged as booked.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.calendar import Period
from billing.invoices.lines.charges import Charge, InvoiceWindow, Subject
from billing.invoices.lines.usage_order import lines_in_order
from billing.pricing.adjustments import Adjustment, PeriodTerms, UsageLine, adjustments
from billing.pricing.entries import DEFAULT_LIST
from billing.pricing.lists import stored_terms

_PRICE_LIST = sa.text("""
    SELECT p.price_list FROM orgs o JOIN plans p ON p.name = o.plan WHERE o.id = :org
""")
_RULES = sa.text("""
    SELECT rule_id, slot, content FROM price_rules
    WHERE price_list = :price_list AND valid @> CAST(:moment AS timestamptz)
    ORDER BY rule_id
""")


async def with_terms(
    db: AsyncEngine, window: InvoiceWindow, charges: Sequence[Charge]
) -> list[Charge]:
    """Return `charges` and, behind them, the adjustments of the org's terms.

    Raises: PriceBookError.
    """
    async with db.connect() as conn:
        terms = await _terms_of(conn, window.org, window.period)
    # Only free allowances depend on the order of usage.
    ordered = await lines_in_order(db, window, terms) if terms.allowances else _lines(charges)
    adjusted = adjustments(terms, ordered)
    return [*charges, *(_charge(each, window.period) for each in adjusted)]


async def _terms_of(conn: AsyncConnection, org: str, period: Period) -> PeriodTerms:
    price_list = await conn.scalar(_PRICE_LIST, {"org": org}) or DEFAULT_LIST
    rows = await conn.execute(_RULES, {"price_list": price_list, "moment": period.start})
    return stored_terms((row.rule_id, row.slot, row.content) for row in rows)


def _lines(charges: Sequence[Charge]) -> list[UsageLine]:
    return [
        UsageLine(
            model=each.subject.model,
            tier=each.subject.tier,
            component=each.subject.component,
            quantity=each.quantity,
            amount_pico=each.amount_pico,
        )
        for each in charges
        if each.subject.kind == "usage"
    ]


def _charge(adjustment: Adjustment, period: Period) -> Charge:
    subject = Subject(
        usage=period,
        kind="adjustment",
        project="",
        model=adjustment.scope.model or "",
        tier=adjustment.scope.tier or "",
        component=adjustment.kind,
        price_id=adjustment.rule_id,
        pico_per_token=None,
    )
    return Charge(
        subject=subject,
        quantity=adjustment.quantity,
        num_requests=0,
        amount_pico=adjustment.amount_pico,
    )
