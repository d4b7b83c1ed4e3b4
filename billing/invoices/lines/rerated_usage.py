"""SQL of usage that was rated anew: the cost by the previous rating is taken back (`before`), and
the cost by the new one is charged (`after`).

    usage, late    events of this invoice, which end up at their cost as of its cutoff
    correction     events of an earlier invoice, taken back at one price and charged at the other

Credit notes are not considered, since they name lines and not events. So a correction of usage
whose line was taken back still changes the next invoice, and the customer may get back more than
was charged. An admin can issue a credit note for the correction, or take back less of the line.

A rating belongs to one invoice, as every posting: the one in whose window its `seq` and its event's
admission are.
"""

from __future__ import annotations

from billing.events import COMPONENTS
from billing.invoices.lines.prices import parts
from billing.tables import AMOUNTS, columns_of

_NAMES = ("id", "request_id", "key", "project", "model", "tier", "admitted_at", "line_kind")


def _side(sign: int, suffix: str) -> str:
    amounts = ", ".join(f"{name}_{suffix} AS {name}" for name in AMOUNTS)
    return f"""
        SELECT {sign} AS sign, {", ".join((*_NAMES, *COMPONENTS))},
            prices_{suffix} AS prices, {amounts}
        FROM changed
    """


SIDES = f"""
    changed AS (
        SELECT u.id, u.request_id, u.key, u.project, u.model, u.tier, u.admitted_at,
            CASE WHEN u.admitted_at >= :start THEN 'usage' WHEN u.seq >= :since THEN 'late'
                ELSE 'correction' END AS line_kind,
            {columns_of("u", COMPONENTS)},
            coalesce(b.prices, p.prices) AS prices_before, r.prices AS prices_after,
            {", ".join(f"coalesce(b.{name}, u.{name}) AS {name}_before" for name in AMOUNTS)},
            {", ".join(f"r.{name} AS {name}_after" for name in AMOUNTS)}
        FROM event_ratings r JOIN usage_events u ON u.id = r.event_id
            JOIN price_sets p ON p.id = u.price_set
            LEFT JOIN event_ratings b ON b.event_id = r.event_id AND b.number = r.number - 1
        WHERE r.org_id = :org AND u.kind = 'usage' AND r.seq < :cutoff AND r.admitted_at < :end
            AND (r.admitted_at >= :start OR r.seq >= :since)
    ),
    sides AS ({_side(-1, "before")} UNION ALL {_side(1, "after")})
"""
"""SQL: CTEs of the usage that is taken back (`sign` -1) and charged (1) in an invoice's window."""
PARTS = f"{SIDES}, parts AS ({parts('sides', 'sign', *_NAMES)})"
"""SQL: the same CTEs, and the parts of that usage (`prices.parts`)."""
