"""Everything that is wrong between what scopes with a cap are said to have spent and the hours and
days of their usage.

At best nothing is wrong.
"""

from __future__ import annotations

from functools import partial

from billing.alerts.alerts import in_books
from billing.checks import complaints

CHECKS = {
    "what it is said to have spent differs from its usage": f"""
        SELECT concat_ws('/', org_id, scope, scope_id, period,
            to_char(period_start AT TIME ZONE 'UTC', 'YYYY-MM-DD'))
        FROM spend_to_date s WHERE spent_pico <> {in_books("s")} ORDER BY 1
    """,
}

check = partial(complaints, CHECKS)
"""Naming scope and period."""
