"""Finds the organizations whose invoices are due, in one query for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import calendar
from billing.invoices.states import DRAFT
from billing.invoices.tables import billing_accounts

DUE = sa.text(f"""
    WITH current AS (
        SELECT DISTINCT ON (org_id) org_id, billing_day, timezone, created_at
        FROM billing_accounts ORDER BY org_id, version DESC
    )
    SELECT current.org_id FROM current
        JOIN unnest(:days, :timezones, :begun) AS period (billing_day, timezone, begun)
            USING (billing_day, timezone)
        LEFT JOIN LATERAL (
            SELECT state, period_end, grace_hours
            FROM invoices JOIN billing_accounts AS terms
                ON terms.org_id = invoices.org_id AND terms.version = invoices.account_version
            WHERE invoices.org_id = current.org_id ORDER BY period_start DESC LIMIT 1
        ) AS newest ON true
    WHERE CASE
        WHEN newest.state = '{DRAFT}'
            THEN newest.period_end + make_interval(hours => newest.grace_hours) <= :now
        WHEN newest.state IS NOT NULL THEN newest.period_end < period.begun
        ELSE least(current.created_at, (
            SELECT min(admitted_at) FROM usage_events WHERE org = current.org_id AND kind = 'usage'
        )) < period.begun
    END
    ORDER BY current.org_id
""").bindparams(
    sa.bindparam("days", type_=ARRAY(sa.SmallInteger)),
    sa.bindparam("timezones", type_=ARRAY(sa.Text)),
    sa.bindparam("begun", type_=ARRAY(sa.TIMESTAMP(timezone=True))),
    sa.bindparam("now", type_=sa.TIMESTAMP(timezone=True)),
)


async def orgs_due(conn: AsyncConnection, now: datetime) -> Sequence[str]:
    """Return the orgs with a period that is to be drafted, or a draft that is to be final.

    A period has ended if another has begun since its start. When that was is the same for all
    accounts of a timezone that have one billing day, of which there are few.
    """
    own = billing_accounts.c
    kinds = (await conn.execute(sa.select(own.billing_day, own.timezone).distinct())).all()
    named = {
        "days": [day for day, _ in kinds],
        "timezones": [timezone for _, timezone in kinds],
        "begun": [calendar.period_at(now, day, timezone).start for day, timezone in kinds],
        "now": now,
    }
    return (await conn.execute(DUE, named)).scalars().all()
