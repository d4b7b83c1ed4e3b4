"""Raise an alert, at most once a day, when an org's spending in an hour is unusual.

An hour is compared with the same hour of the same weekday in past weeks, by the median and the
median deviation, so that one odd week does not move the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import median_high

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import RAISE, SPENT, UNUSUAL, WHOLE
from billing.money import PICO_PER_USD, Pico, median
from billing.tables import TOTAL_PICO

WEEKS = 8
MIN_WEEKS = 4
"""With fewer weeks before it no hour is unusual."""
DEVIATIONS = 6
DEVIATION_PER_10_000 = 14_826
"""A standard deviation of normally distributed amounts is 1.4826 median deviations."""
LEAST_EXCESS_PICO: Pico = PICO_PER_USD
"""An hour is not unusual if it exceeds the median by less."""
GRACE = timedelta(minutes=10)
"""An hour's usage is booked until so long after its end."""
HOUR, WEEK = timedelta(hours=1), timedelta(weeks=1)


def bound_pico(past: Sequence[Pico]) -> Pico | None:
    """Return the amount from which an hour is unusual. None: there are too few weeks. `past`: the
    same hours of past weeks."""
    if len(past) < MIN_WEEKS:
        return None
    usual = median(sorted(past))
    deviation = median_high(abs(amount - usual) for amount in past)
    excess = DEVIATIONS * deviation * DEVIATION_PER_10_000 // 10_000
    return usual + max(excess, usual, LEAST_EXCESS_PICO)


_HOURS = sa.text(f"""
    SELECT o.id AS org, h.hour, h.spent, f.first
    FROM orgs o
        CROSS JOIN LATERAL (
            SELECT hour, sum({TOTAL_PICO}) AS spent FROM usage_hourly
            WHERE org = o.id AND hour = ANY(CAST(:hours AS timestamptz[])) GROUP BY hour
        ) h
        CROSS JOIN LATERAL (
            SELECT day AS first FROM usage_daily WHERE org = o.id ORDER BY day LIMIT 1
        ) f
    WHERE o.archived_at IS NULL
""")
_RAISE = sa.text(f"""
    WITH reached AS (
        SELECT org AS org_id, 'org' AS scope, org AS scope_id, '{UNUSUAL}' AS measure, '' AS cap_id,
            'day' AS period, CAST(:day AS timestamptz) AS period_start, ceiling, used,
            '{SPENT}' AS reason
        FROM unnest(CAST(:org AS text[]), CAST(:ceiling AS numeric[]), CAST(:used AS numeric[]))
            AS r(org, ceiling, used)
    )
    {RAISE}
""")


async def watch(db: AsyncEngine, now: datetime) -> None:
    """Check the last hour that is complete. `db`: of a role that sees every org's rows."""
    ended = (now.astimezone(UTC) - GRACE).replace(minute=0, second=0, microsecond=0)
    hour = ended - HOUR
    hours = [hour - weeks * WEEK for weeks in range(WEEKS + 1)]
    async with db.begin() as conn:
        found = (await conn.execute(_HOURS, {"hours": hours})).all()
        spent = {(row.org, row.hour): int(row.spent) for row in found}
        firsts = {row.org: row.first for row in found}
        raised: list[tuple[str, Pico, Pico]] = []
        for org, first in firsts.items():
            used = spent.get((org, hour), 0)
            bound = bound_pico([spent.get((org, each), 0) for each in hours[1:] if each >= first])
            if bound is not None and used >= bound:
                raised.append((org, bound, used))
        if raised:
            orgs, ceilings, amounts = zip(*raised, strict=True)
            wanted = {"org": list(orgs), "ceiling": list(ceilings), "used": list(amounts)}
            day = hour.replace(hour=0)
            await conn.execute(_RAISE, {**wanted, "day": day, "thresholds": [WHOLE]})
