"""Alerts: a scope has reached a threshold of a budget, limit or balance. Each is raised once per
period and threshold, which a unique constraint of the table enforces.

Knows no webhook: rows that are not dispatched yet are the outbox.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import Attempt
from billing.ledger.spend_totals import hold_books
from billing.ledger.tags import TagSpend
from billing.tables import (
    EPOCH,
    TOTAL_PICO,
    alerts,
    new_id_sql,
    read_struct,
    to_arrays,
    to_moment,
)

THRESHOLDS = (50, 80, 100)
"""Percentages of a budget or a limit at which alerts are raised."""
WHOLE = 100
Reason = Literal["spent", "refused"]
SPENT: Reason = "spent"
REFUSED: Reason = "refused"
CreditMeasure = Literal["credits_low", "credits_exhausted"]
MoneyMeasure = Literal["spend", "unusual_spend", CreditMeasure]
TokenMeasure = Literal["disputed_usage"]
SPEND: MoneyMeasure = "spend"
UNUSUAL: MoneyMeasure = "unusual_spend"
DISPUTED: TokenMeasure = "disputed_usage"


class MeasureKind(NamedTuple):
    """How a measure is reported."""

    event: str
    """The type of its webhook event (`gateway/wire/admin/webhook_events.py`)."""
    unit: Literal["usd", "tokens"]
    has_reason: bool = False
    """True if alerts tell whether the money was spent or a request was refused."""
    is_balance: bool = False
    """True if `ceiling` is a threshold of the balance and `used` is what is left of it."""


_BUDGET = MeasureKind("budget.threshold_reached", "usd", has_reason=True)
_RATE_LIMIT = MeasureKind("rate_limit.threshold_reached", "tokens")
_KINDS: dict[str, MeasureKind] = {
    "spend": _BUDGET,
    "unusual_spend": MeasureKind("spend.unusual", "usd"),
    "credits_low": MeasureKind("credits.low", "usd", has_reason=True, is_balance=True),
    "credits_exhausted": MeasureKind("credits.exhausted", "usd", has_reason=True, is_balance=True),
    "disputed_usage": MeasureKind("usage.disputed", "tokens"),
}
"""Each `MoneyMeasure` and `TokenMeasure`. All other measures are rate limits, by their names; the
table's constraint `alerts_measure` lists them all."""


def kind_of_measure(measure: str) -> MeasureKind:
    return _KINDS.get(measure, _RATE_LIMIT)


MINUTE_S = 60
FORGET_MINUTES_S = 2 * 3600
FORGET_HOURS_S = 90 * 86_400
"""Alerts of rate limits are deleted after so long; those of budgets are kept."""
SWEEP_BATCH = 1000


# Ids of one statement are in the order of its thresholds.
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
"""SQL: insert the alerts of a CTE `reached` that do not exist yet."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    scope: str
    scope_id: str
    measure: str
    """A `MoneyMeasure`, a `TokenMeasure`, or the name of a rate limit."""
    cap_id: str
    """Empty for a rate limit."""
    period: str
    period_start: datetime
    threshold: int
    ceiling: int
    """Pico-USD or tokens, as the measure has it."""
    used: int
    """The use of the ceiling when the alert was raised."""
    reason: Reason
    """`spent`: the use reaches the threshold; `refused`: a hard cap has refused a request whose
    highest possible cost did not fit, so that less than the cap is spent."""
    occurred_at: datetime


COLUMNS = [alerts.c[name] for name in Alert.__struct_fields__]


def to_alerts(rows: Iterable[sa.Row[Any]]) -> list[Alert]:
    return [read_struct(Alert, row) for row in rows]


def select_alerts(org_id: str) -> sa.Select[Any]:
    return sa.select(*COLUMNS).where(alerts.c.org_id == org_id)


async def undispatched(connection: AsyncConnection, limit: int) -> list[Alert]:
    """Return and lock the oldest alerts that are not dispatched."""
    waiting = sa.select(*COLUMNS).where(alerts.c.dispatched_at.is_(None))
    locked = waiting.order_by(alerts.c.id).limit(limit).with_for_update(skip_locked=True)
    return to_alerts(await connection.execute(locked))


async def mark_dispatched(connection: AsyncConnection, ids: Sequence[str]) -> None:
    done = sa.update(alerts).where(alerts.c.id.in_(ids))
    await connection.execute(done.values(dispatched_at=sa.func.now()))


OWNER = "coalesce(key_id, project_id, model, tag, org_id)"
"""SQL: the id of the scope of a row of spend_caps."""


def booked_spend(table: str) -> str:
    """Return SQL of the spending of a row's scope in its period, added up from the rollups."""

    def within(moment: str) -> str:
        return f"""({table}.period = 'total' OR ({moment} >= {table}.period_start
            AND {moment} < ({table}.period_start AT TIME ZONE 'UTC'
                + CASE {table}.period WHEN 'day' THEN interval '1 day'
                    ELSE interval '1 month' END) AT TIME ZONE 'UTC'))"""

    total = f"SELECT coalesce(sum({TOTAL_PICO}), 0)"
    return f"""CASE {table}.scope WHEN 'tag' THEN (
        {total} FROM usage_tags_daily d
        WHERE d.org = {table}.org_id AND d.tag = split_part({table}.scope_id, '=', 1)
            AND d.value = split_part({table}.scope_id, '=', 2) AND {within("d.day")}
    ) ELSE (
        {total} FROM usage_hourly h
        WHERE h.org = {table}.org_id
            AND {table}.scope_id = CASE {table}.scope
                WHEN 'org' THEN h.org WHEN 'project' THEN h.project
                WHEN 'model' THEN h.model ELSE h.key END
            AND {within("h.hour")}
    ) END"""


def spent_so_far(table: str) -> str:
    """Return SQL of the same spending, from spend_to_date where the scope is kept there."""
    names = ("org_id", "scope", "scope_id", "period", "period_start")
    same = " AND ".join(f"s.{name} = {table}.{name}" for name in names)
    known = f"(SELECT spent_pico FROM spend_to_date s WHERE {same})"
    return f"coalesce({known}, {booked_spend(table)})"


DAY_S = 86_400


class Spend(msgspec.Struct, frozen=True):
    """The amount booked for a key and a model in one day (UTC) of admission."""

    org: str
    project: str
    key: str
    model: str
    day: int
    """Days since 1970."""
    amount_pico: int
    """Negative when a new rating costs less."""


def sum_up(booked: Iterable[tuple[Attempt, int]]) -> list[Spend]:
    """Add up amounts in pico-USD by key, model and day."""
    amounts: dict[tuple[str, str, str, str, int], int] = defaultdict(int)
    for attempt, amount_pico in booked:
        day = (to_moment(attempt.admitted_at) - EPOCH).days
        amounts[attempt.org, attempt.project, attempt.key, attempt.model, day] += amount_pico
    return [Spend(*group, amount_pico) for group, amount_pico in amounts.items()]


# Spending to date of each booked scope and period. Past spending is added up once, when a cap first
# needs it; then the sum grows with each booking. Orgs that never had a cap have no such sums.
_RAISE_FOR_SPEND = sa.text(f"""
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
            CASE WHEN is_known THEN amount_pico ELSE {booked_spend("known")} END
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
    """Raise alerts for the caps whose thresholds `spends` reach, after booking them in the same
    transaction.

    Transactions that book for one org wait for each other at the lock of its balance, so the second
    one sees what the first has spent. Amounts that cancel out for a key and a model may still
    change the sums of tags."""
    if not (spends or tags):
        return
    columns = to_arrays(Spend, spends) | {
        name if name == "tag" else f"tag_{name}": values
        for name, values in to_arrays(TagSpend, tags).items()
    }
    await connection.execute(_RAISE_FOR_SPEND, {**columns, "thresholds": list(THRESHOLDS)})


_RAISE_FOR_CAP = sa.text(f"""
    WITH caps AS (
        SELECT id AS cap_id, org_id, scope, {OWNER} AS scope_id, period,
            amount_pico AS ceiling, CASE period WHEN 'total' THEN to_timestamp(0)
                ELSE date_trunc(period, coalesce(CAST(:at AS timestamptz), clock_timestamp()),
                    'UTC') END AS period_start
        FROM spend_caps WHERE id = :cap_id AND archived_at IS NULL
    ),
    reached AS (
        SELECT caps.*, '{SPEND}' AS measure, '{SPENT}' AS reason, {spent_so_far("caps")} AS used
        FROM caps
    )
    {RAISE}
""")


async def raise_for_cap(
    connection: AsyncConnection, cap_id: str, at: datetime | None = None
) -> None:
    """Raise alerts for what is spent already of a new or changed cap, in the period of `at` (None:
    now). Called at the end of the transaction that changes it, before the audit entry. The books
    are locked until then: a concurrent booking is in the sum or sees the cap."""
    await hold_books(connection)
    named = {"cap_id": cap_id, "at": at, "thresholds": list(THRESHOLDS)}
    await connection.execute(_RAISE_FOR_CAP, named)


class CapRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refusal of a request by a hard cap, in the period that began at `period_start`."""

    org_id: str
    scope: str
    scope_id: str
    period: str
    period_start: datetime | None
    """None for the period `total`."""
    amount_pico: int
    """The cap at the time of the refusal."""


# A scope and a period may have several caps; what one refuses, all lower ones refuse.
_RAISE_FOR_REFUSALS = sa.text(f"""
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
        SELECT caps.*, '{SPEND}' AS measure, {spent_so_far("caps")} AS used FROM caps
    ),
    reached AS (
        SELECT spent.*, CASE WHEN used > 0 AND used >= ceiling THEN '{SPENT}' ELSE '{REFUSED}' END
            AS reason
        FROM spent
    )
    {RAISE}
""")


async def raise_for_refusals(db: AsyncEngine, refusals: Sequence[CapRefusal]) -> None:
    """Raise the last threshold of the caps that have refused, with their booked spending. `db`: of
    a role that sees every org's rows."""
    named = to_arrays(CapRefusal, refusals) | {"thresholds": [WHOLE]}
    async with db.begin() as connection:
        await connection.execute(_RAISE_FOR_REFUSALS, named)


_RAISE_FOR_CREDIT = sa.text(f"""
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
    """Raise an alert that a balance has crossed a threshold (`balance_watch`)."""
    named = {"org_id": org_id, "measure": measure, "reason": reason, "thresholds": [WHOLE]}
    amounts = {"threshold_pico": threshold_pico, "left_pico": left_pico}
    await connection.execute(_RAISE_FOR_CREDIT, {**named, **amounts})


class CeilingUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a limit that a scope used at one gateway in a minute, since its last report."""

    org_id: str
    scope: str
    scope_id: str
    measure: str
    """The name of the limit."""
    minute: int
    """Unix seconds of its start."""
    tokens: int
    """Negative if more was given back than taken."""
    limit: int


_RAISE_FOR_CEILINGS = sa.text(f"""
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
    """Add uses to those of all gateways, and raise alerts for the fullest minute of each hour, each
    threshold once an hour. `uses` has one item for each scope, measure and minute. `db`: of a role
    that sees every org's rows."""
    named = to_arrays(CeilingUse, uses) | {"thresholds": list(THRESHOLDS)}
    named["minute"] = [to_moment(each.minute) for each in uses]
    async with db.begin() as connection:
        await connection.execute(_RAISE_FOR_CEILINGS, named)


_FORGET = (
    f"""
    DELETE FROM ceiling_minutes WHERE ctid IN (
        SELECT ctid FROM ceiling_minutes
        WHERE minute < now() - interval '{FORGET_MINUTES_S} seconds'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
    """,
    f"""
    DELETE FROM alerts WHERE id IN (
        SELECT id FROM alerts
        WHERE period = 'hour' AND occurred_at < now() - interval '{FORGET_HOURS_S} seconds'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
    """,
)


async def sweep(db: AsyncEngine) -> None:
    """Delete old alerts of rate limits, and old minutes. `db`: of a role that sees every org's
    rows."""
    for statement in _FORGET:
        deleted = SWEEP_BATCH
        while deleted == SWEEP_BATCH:
            async with db.begin() as connection:
                deleted = (await connection.execute(sa.text(statement))).rowcount
