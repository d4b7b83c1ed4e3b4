"""Alerts: a scope has used so much of what it may, said once per period and threshold.

It knows no webhook: a row that was not dispatched yet is the outbox. That a row is one of its kind
is its table's unique constraint, so whoever comes second, or again, adds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import Attempt
from billing.ledger.spend_totals import hold_books
from billing.ledger.tags import TagSpend
from billing.tables import AMOUNTS, EPOCH, alerts, new_id_sql, to_moment

THRESHOLDS = (50, 80, 100)
"""Percent."""
WHOLE = 100
Reason = Literal["spent", "refused"]
SPENT: Reason = "spent"
REFUSED: Reason = "refused"
SPEND: Literal["spend"] = "spend"
UNUSUAL: Literal["unusual_spend"] = "unusual_spend"
"""Of an hour, for its weekday (`unusual_spend`): the ceiling is what would have been usual."""
CREDITS_LOW: Literal["credits_low"] = "credits_low"
CREDITS_EXHAUSTED: Literal["credits_exhausted"] = "credits_exhausted"
"""Of a prepaid balance (`balance_watch`): the ceiling is the threshold, used is what is left."""
OF_CREDITS = (CREDITS_LOW, CREDITS_EXHAUSTED)
CreditMeasure = Literal["credits_low", "credits_exhausted"]
IN_MONEY = (SPEND, UNUSUAL, *OF_CREDITS)
TokenMeasure = Literal["tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"]
MINUTE_S = 60
FORGET_MINUTES_S = 2 * 3600
FORGET_HOURS_S = 90 * 86_400
"""After which alerts of a rate limit's hour are deleted; those of budgets are kept."""
SWEEP_BATCH = 1000


# In the order of the thresholds of one statement.
NEW_ID = new_id_sql("alert_", "array_position(CAST(:thresholds AS smallint[]), threshold)")
_ADD = f"""
    INSERT INTO alerts
        (id, org_id, scope, scope_id, measure, cap_id, period, period_start, threshold, ceiling,
        used, reason)
    SELECT {NEW_ID}, org_id, scope, scope_id, measure, cap_id, period, period_start, threshold,
        ceiling, used, reason
    FROM reached CROSS JOIN unnest(CAST(:thresholds AS smallint[])) AS threshold
"""
RAISE = f"""
    {_ADD}
    WHERE reason = '{REFUSED}' OR (used > 0 AND used * 100 >= ceiling * threshold)
    ORDER BY org_id, scope, scope_id, measure, cap_id, period, period_start, threshold
    ON CONFLICT ON CONSTRAINT alerts_once DO NOTHING
"""
"""Of a CTE `reached`, the alerts that are not there yet."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    scope: str
    scope_id: str
    measure: str
    cap_id: str
    """Empty of a rate limit."""
    period: str
    period_start: datetime
    threshold: int
    ceiling: int
    """Pico-USD, or tokens."""
    used: int
    """So much of it, when it was noticed."""
    reason: Reason
    """What was used reaches the threshold; or a hard cap has refused, which holds the most that a
    request may cost, so that less than all of it is spent."""
    occurred_at: datetime


COLUMNS = [alerts.c[name] for name in Alert.__struct_fields__]


def to_alerts(rows: Iterable[sa.Row[Any]]) -> list[Alert]:
    return [
        Alert(**{**row._mapping, "ceiling": int(row.ceiling), "used": int(row.used)})
        for row in rows
    ]


def select_alerts(org_id: str) -> sa.Select[Any]:
    """Those of an org, for a page of them."""
    return sa.select(*COLUMNS).where(alerts.c.org_id == org_id)


async def undispatched(connection: AsyncConnection, limit: int) -> list[Alert]:
    """The oldest ones, and nobody else's until the transaction ends."""
    waiting = sa.select(*COLUMNS).where(alerts.c.dispatched_at.is_(None))
    locked = waiting.order_by(alerts.c.id).limit(limit).with_for_update(skip_locked=True)
    return to_alerts(await connection.execute(locked))


async def mark_dispatched(connection: AsyncConnection, ids: Sequence[str]) -> None:
    done = sa.update(alerts).where(alerts.c.id.in_(ids))
    await connection.execute(done.values(dispatched_at=sa.func.now()))


OWNER = "coalesce(key_id, project_id, model, tag, org_id)"
"""SQL: of a cap, what its scope is called."""


def in_books(of: str) -> str:
    """SQL: what the scope of a row of `of` has spent in its period, by its days and hours."""

    def within(moment: str) -> str:
        return f"""({of}.period = 'total' OR ({moment} >= {of}.period_start
            AND {moment} < ({of}.period_start AT TIME ZONE 'UTC'
                + CASE {of}.period WHEN 'day' THEN interval '1 day'
                    ELSE interval '1 month' END) AT TIME ZONE 'UTC'))"""

    total = f"SELECT coalesce(sum({' + '.join(AMOUNTS)}), 0)"
    return f"""CASE {of}.scope WHEN 'tag' THEN (
        {total} FROM usage_tags_daily d
        WHERE d.org = {of}.org_id AND d.tag = split_part({of}.scope_id, '=', 1)
            AND d.value = split_part({of}.scope_id, '=', 2) AND {within("d.day")}
    ) ELSE (
        {total} FROM usage_hourly h
        WHERE h.org = {of}.org_id
            AND {of}.scope_id = CASE {of}.scope
                WHEN 'org' THEN h.org WHEN 'project' THEN h.project
                WHEN 'model' THEN h.model ELSE h.key END
            AND {within("h.hour")}
    ) END"""


def _by_now(of: str) -> str:
    """The same, where it may stand added up already."""
    names = ("org_id", "scope", "scope_id", "period", "period_start")
    same = " AND ".join(f"s.{name} = {of}.{name}" for name in names)
    known = f"(SELECT spent_pico FROM spend_to_date s WHERE {same})"
    return f"coalesce({known}, {in_books(of)})"


DAY_S = 86_400


class Spend(msgspec.Struct, frozen=True):
    """The amount booked for a key and a model in one day (UTC) of admission."""

    org: str
    project: str
    key: str
    model: str
    day: int
    """Since 1970."""
    amount_pico: int
    """Less than nothing, where it was rated anew and costs less."""


def sum_up(booked: Iterable[tuple[Attempt, int]]) -> list[Spend]:
    """By key, model and day, of what tenants are billed for (pico-USD)."""
    amounts: dict[tuple[str, str, str, str, int], int] = defaultdict(int)
    for attempt, amount_pico in booked:
        day = (to_moment(attempt.admitted_at) - EPOCH).days
        amounts[attempt.org, attempt.project, attempt.key, attempt.model, day] += amount_pico
    return [Spend(*of, amount_pico) for of, amount_pico in amounts.items()]


# What each (scope, period) of what was booked has spent by now. The sum of its past is read once,
# when it is first looked at; from then on it grows with what is booked. Orgs that never had a cap
# have no such sum.
_SPENT = sa.text(f"""
    WITH spent AS (
        SELECT org, project, key, model, to_timestamp(day * {DAY_S}) AS day, amount_pico
        FROM unnest(CAST(:org AS text[]), CAST(:project AS text[]), CAST(:key AS text[]),
            CAST(:model AS text[]), CAST(:day AS bigint[]), CAST(:amount_pico AS numeric[]))
            AS s(org, project, key, model, day, amount_pico)
        WHERE org IN (SELECT org_id FROM spend_caps)
    ),
    tagged AS (
        SELECT org, tag, to_timestamp(day * {DAY_S}) AS day, amount_pico
        FROM unnest(CAST(:tag_org AS text[]), CAST(:tag AS text[]), CAST(:tag_day AS bigint[]),
            CAST(:tag_amount_pico AS numeric[])) AS s(org, tag, day, amount_pico)
        WHERE org IN (SELECT org_id FROM spend_caps)
    ),
    caps AS (
        SELECT id AS cap_id, org_id, scope, {OWNER} AS scope_id, period, amount_pico AS ceiling
        FROM spend_caps WHERE archived_at IS NULL
            AND org_id IN (SELECT org FROM spent UNION SELECT org FROM tagged)
    ),
    of_scopes AS (
        SELECT org, scope, scope_id, day, amount_pico
        FROM spent CROSS JOIN LATERAL (VALUES ('org', org), ('project', project), ('key', key),
            ('model', model)) AS s(scope, scope_id)
        UNION ALL SELECT org, 'tag', tag, day, amount_pico FROM tagged
    ),
    grows AS (
        SELECT org AS org_id, scope, scope_id, period,
            CASE period WHEN 'total' THEN to_timestamp(0)
                ELSE date_trunc(period, day, 'UTC') END AS period_start,
            sum(amount_pico) AS amount_pico
        FROM of_scopes CROSS JOIN unnest(ARRAY['day', 'month', 'total']) AS period
        WHERE amount_pico <> 0
        GROUP BY 1, 2, 3, 4, 5
    ),
    known AS (
        SELECT g.*, s.org_id IS NOT NULL AS is_known
        FROM grows g
            LEFT JOIN spend_to_date s USING (org_id, scope, scope_id, period, period_start)
        WHERE s.org_id IS NOT NULL OR (org_id, scope, scope_id, period)
            IN (SELECT org_id, scope, scope_id, period FROM caps)
    ),
    grown AS (
        INSERT INTO spend_to_date AS s (org_id, scope, scope_id, period, period_start, spent_pico)
        SELECT org_id, scope, scope_id, period, period_start,
            CASE WHEN is_known THEN amount_pico ELSE {in_books("known")} END
        FROM known ORDER BY org_id, scope, scope_id, period, period_start
        ON CONFLICT (org_id, scope, scope_id, period, period_start)
            DO UPDATE SET spent_pico = s.spent_pico + EXCLUDED.spent_pico
        RETURNING *
    ),
    reached AS (
        SELECT caps.*, '{SPEND}' AS measure, '{SPENT}' AS reason, grown.period_start,
            grown.spent_pico AS used
        FROM grown JOIN caps USING (org_id, scope, scope_id, period)
    )
    {RAISE}
""")


async def raise_for_spend(
    connection: AsyncConnection, spends: Sequence[Spend], tags: Sequence[TagSpend] = ()
) -> None:
    """Raise what `spends` bring a cap's scope to: in the transaction that booked them, once it has.

    Two transactions that book for an org wait for each other at its balance, before this, so the
    second sees what the first has spent. What comes to nothing for a key and a model may come to
    something for each of its tags."""
    if not (spends or tags):
        return
    columns = {name: [getattr(it, name) for it in spends] for name in Spend.__struct_fields__}
    columns |= {
        name if name == "tag" else f"tag_{name}": [getattr(it, name) for it in tags]
        for name in TagSpend.__struct_fields__
    }
    await connection.execute(_SPENT, {**columns, "thresholds": list(THRESHOLDS)})


_OF_CAP = sa.text(f"""
    WITH caps AS (
        SELECT id AS cap_id, org_id, scope, {OWNER} AS scope_id, period,
            amount_pico AS ceiling, CASE period WHEN 'total' THEN to_timestamp(0)
                ELSE date_trunc(period, coalesce(CAST(:at AS timestamptz), clock_timestamp()),
                    'UTC') END AS period_start
        FROM spend_caps WHERE id = :cap_id AND archived_at IS NULL
    ),
    reached AS (
        SELECT caps.*, '{SPEND}' AS measure, '{SPENT}' AS reason, {_by_now("caps")} AS used
        FROM caps
    )
    {RAISE}
""")


async def raise_for_cap(
    connection: AsyncConnection, cap_id: str, at: datetime | None = None
) -> None:
    """Raise what is spent already of a cap, in the period of `at` (None: the one that runs): last
    but for its audit entry in the transaction that makes or changes it. Nobody books until that
    ends, so that what is booked at the same time is either in the sum or sees the cap."""
    await hold_books(connection)
    await connection.execute(_OF_CAP, {"cap_id": cap_id, "at": at, "thresholds": list(THRESHOLDS)})


class CapRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A hard cap has refused, in the period that began at `period_start`."""

    org_id: str
    scope: str
    scope_id: str
    period: str
    period_start: datetime | None
    """None of `total`."""
    amount_pico: int
    """The cap as it was."""


# Of one scope and period there may be several; whatever a cap refuses, a lower one does.
_OF_REFUSALS = sa.text(f"""
    WITH refusals AS (
        SELECT org_id, scope, scope_id, period,
            coalesce(period_start, to_timestamp(0)) AS period_start, max(amount_pico) AS most
        FROM unnest(CAST(:org_id AS text[]), CAST(:scope AS text[]), CAST(:scope_id AS text[]),
            CAST(:period AS text[]), CAST(:period_start AS timestamptz[]),
            CAST(:amount_pico AS numeric[]))
            AS r(org_id, scope, scope_id, period, period_start, amount_pico)
        GROUP BY 1, 2, 3, 4, 5
    ),
    caps AS (
        SELECT c.id AS cap_id, r.org_id, r.scope, r.scope_id, r.period, r.period_start,
            c.amount_pico AS ceiling
        FROM refusals r JOIN spend_caps c USING (org_id, scope, period)
        WHERE coalesce(c.key_id, c.project_id, c.org_id) = r.scope_id
            AND c.hard AND c.archived_at IS NULL AND c.amount_pico <= r.most
            AND NOT EXISTS (
                SELECT FROM alerts a
                WHERE a.org_id = r.org_id AND a.scope = r.scope AND a.scope_id = r.scope_id
                    AND a.measure = '{SPEND}' AND a.cap_id = c.id AND a.period = r.period
                    AND a.period_start = r.period_start AND a.threshold = {WHOLE}
            )
    ),
    spent AS (
        SELECT caps.*, '{SPEND}' AS measure, {_by_now("caps")} AS used FROM caps
    ),
    reached AS (
        SELECT spent.*, CASE WHEN used > 0 AND used >= ceiling THEN '{SPENT}' ELSE '{REFUSED}' END
            AS reason
        FROM spent
    )
    {RAISE}
""")


async def raise_for_refusals(db: AsyncEngine, refusals: Sequence[CapRefusal]) -> None:
    """Raise the last threshold of the caps that have refused, with what the books have spent of
    them. `db`: of a role that sees every org's rows."""
    columns = {
        name: [getattr(each, name) for each in refusals] for name in CapRefusal.__struct_fields__
    }
    async with db.begin() as connection:
        await connection.execute(_OF_REFUSALS, {**columns, "thresholds": [WHOLE]})


_OF_CREDIT = sa.text(f"""
    WITH reached AS (
        SELECT CAST(:org_id AS text) AS org_id, 'org' AS scope, CAST(:org_id AS text) AS scope_id,
            CAST(:measure AS text) AS measure, '' AS cap_id, 'crossing' AS period,
            clock_timestamp() AS period_start, CAST(:threshold_pico AS numeric) AS ceiling,
            CAST(:left_pico AS numeric) AS used, CAST(:reason AS text) AS reason
    )
    {_ADD}
""")


async def raise_for_credit(
    connection: AsyncConnection,
    org_id: str,
    measure: CreditMeasure,
    threshold_pico: int,
    left_pico: int,
    reason: Reason,
) -> None:
    """A balance has crossed a threshold, which its caller alone can know (`balance_watch`)."""
    said = {"org_id": org_id, "measure": measure, "reason": reason, "thresholds": [WHOLE]}
    amounts = {"threshold_pico": threshold_pico, "left_pico": left_pico}
    await connection.execute(_OF_CREDIT, {**said, **amounts})


class CeilingUse(msgspec.Struct, frozen=True, kw_only=True):
    """The most of a limit that one gateway saw a scope use in a minute, since its last report."""

    org_id: str
    scope: str
    scope_id: str
    measure: TokenMeasure
    minute: int
    """Unix seconds of its start."""
    tokens: int
    """Negative where more was given back than taken."""
    limit: int


_NOTE = sa.text(f"""
    WITH noted AS (
        SELECT * FROM unnest(CAST(:org_id AS text[]), CAST(:scope AS text[]),
            CAST(:scope_id AS text[]), CAST(:measure AS text[]), CAST(:minute AS timestamptz[]),
            CAST(:tokens AS bigint[]), CAST(:limit AS bigint[]))
            AS n(org_id, scope, scope_id, measure, minute, tokens, ceiling)
    ),
    grown AS (
        INSERT INTO ceiling_minutes AS c (org_id, scope, scope_id, measure, minute, used)
        SELECT org_id, scope, scope_id, measure, minute, tokens FROM noted
        ORDER BY org_id, scope, scope_id, measure, minute
        ON CONFLICT (org_id, scope, scope_id, measure, minute)
            DO UPDATE SET used = c.used + EXCLUDED.used
        RETURNING *
    ),
    reached AS (
        SELECT grown.org_id, grown.scope, grown.scope_id, grown.measure, '' AS cap_id,
            'hour' AS period, date_trunc('hour', grown.minute, 'UTC') AS period_start,
            noted.ceiling, '{SPENT}' AS reason, max(grown.used) AS used
        FROM grown JOIN noted USING (org_id, scope, scope_id, measure, minute)
        GROUP BY 1, 2, 3, 4, 5, 6, 7, 8
    )
    {RAISE}
""")


async def note_ceilings(db: AsyncEngine, uses: Sequence[CeilingUse]) -> None:
    """Add to what all gateways saw in these minutes, and raise what that comes to: of the fullest
    minute of an hour, each threshold once an hour. One `CeilingUse` for each scope, measure and
    minute. `db`: of a role that sees every org's rows."""
    columns = {
        name: [getattr(each, name) for each in uses]
        for name in CeilingUse.__struct_fields__
        if name != "minute"
    }
    moments = [to_moment(each.minute) for each in uses]
    async with db.begin() as connection:
        await connection.execute(
            _NOTE, {**columns, "minute": moments, "thresholds": list(THRESHOLDS)}
        )


_FORGET = (
    (
        f"""
    DELETE FROM ceiling_minutes WHERE ctid IN (
        SELECT ctid FROM ceiling_minutes
        WHERE minute < now() - interval '{FORGET_MINUTES_S} seconds'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
    """
    ),
    (
        f"""
    DELETE FROM alerts WHERE id IN (
        SELECT id FROM alerts
        WHERE period = 'hour' AND occurred_at < now() - interval '{FORGET_HOURS_S} seconds'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
    """
    ),
)


async def sweep(db: AsyncEngine) -> None:
    """Delete what is too old to be asked for. `db`: of a role that sees every org's rows."""
    for statement in _FORGET:
        deleted = SWEEP_BATCH
        while deleted == SWEEP_BATCH:
            async with db.begin() as connection:
                deleted = (await connection.execute(sa.text(statement))).rowcount
