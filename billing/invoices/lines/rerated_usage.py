"""Count rated-anew usage for an invoice: what an event cost by the rating before is taken back, and
what it costs by this one is charged.

    usage, late    of events that this invoice has: only what they cost by its cutoff is left
    correction     of events that an earlier one has: taken back at the one price, charged at the
                   other, which is what the invoice shows

It is blind to credit notes, which are of an invoice's lines and not of events. So a correction of
usage whose line was taken back, in part or in whole, changes the next invoice all the same, be it a
refund of some cents (then the customer has more back than was charged) or a charge. Nobody can say
which events of a line a note has meant, and the ledger has both: who wants it otherwise writes a
credit note over the correction, or takes less back of the line.

A rating is of one invoice, as every posting is: it stands in the window that its number (`seq`) and
its event's admission fall into.
"""

from __future__ import annotations

from billing.events import COMPONENTS
from billing.invoices.lines.prices import parts
from billing.tables import AMOUNTS

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
            {", ".join(f"u.{name}" for name in COMPONENTS)},
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
"""SQL: CTEs of what is taken back (`sign` -1) and charged (1) in the window of an invoice."""
PARTS = f"{SIDES}, parts AS ({parts('sides', 'sign', *_NAMES)})"
"""SQL: and the same by what they cost."""
