"""Reads budgets as a person looks at them: what an organization, a project or a key may spend in a
period, and how much of that is used, held by running requests, and left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from redis.exceptions import RedisError

from billing.alerts.alerts import spent_so_far
from billing.money import Pico
from billing.queries import Query
from gateway.limits.counters import spent_now
from gateway.limits.spending import PICO_PER_NANO, counter_of
from gateway.principal import CapPeriod, CapScope

MAX_BUDGETS = 20
"""The tightest of an organization and one project."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    scope: CapScope
    scope_id: str
    period: CapPeriod
    amount_pico: Pico
    hard: bool
    """False: nothing is refused when it is spent."""
    used_pico: Pico
    """The part that is booked."""
    held_pico: Pico = 0
    """Running requests hold it; what they do not use is given back."""
    resets_at: datetime | None = None

    @property
    def left_pico(self) -> Pico:
        return max(0, self.amount_pico - self.used_pico - self.held_pico)

    @property
    def part(self) -> float:
        return self.used_pico / self.amount_pico if self.amount_pico else 1.0

    @property
    def held_part(self) -> float:
        return self.held_pico / self.amount_pico if self.amount_pico else 0.0


def budgets_sql(org: str, project: str) -> str:
    """Return SQL of the budgets of an organization itself and of one project, with what is booked
    of each. `org`, `project`: the names of the values."""
    return f"""
        SELECT caps.id, caps.scope, caps.scope_id, caps.period, caps.hard,
            CAST(caps.amount_pico AS text) AS amount_pico,
            CAST({spent_so_far("caps")} AS text) AS used_pico
        FROM (
            SELECT id, org_id, scope, coalesce(project_id, org_id) AS scope_id, period, hard,
                amount_pico, CASE period WHEN 'total' THEN to_timestamp(0)
                    ELSE date_trunc(period, now(), 'UTC') END AS period_start
            FROM spend_caps WHERE org_id = :{org} AND archived_at IS NULL
                AND (scope = 'org' OR scope = 'project' AND project_id = :{project})
            ORDER BY scope DESC, amount_pico LIMIT {MAX_BUDGETS}
        ) AS caps
    """


_COLUMNS = sa.text(budgets_sql("budgets_org", "budgets_project")).columns(
    *(sa.column(name, sa.Text) for name in ("id", "scope", "scope_id", "period")),
    sa.column("hard", sa.Boolean),
    *(sa.column(name, sa.Text) for name in ("amount_pico", "used_pico")),
)


def budgets_query(org_id: str, project_id: str | None = None) -> Query[list[Budget]]:
    """Return the query of the budgets of an organization and of one of its projects."""
    select = _COLUMNS.bindparams(budgets_org=org_id, budgets_project=project_id or "")
    return Query(select, lambda rows: [to_budget(row._asdict()) for row in rows])


def to_budget(values: dict[str, Any]) -> Budget:
    """Make a budget of a row of `budgets_sql`."""
    amounts = {name: int(values[name]) for name in ("amount_pico", "used_pico")}
    return Budget(**{**values, **amounts})


async def with_held(
    redis: Redis, org_id: str, budgets: Iterable[Budget], now: datetime
) -> list[Budget]:
    """Add what running requests hold, by one command, and when each begins anew. Where the store
    does not answer, what is booked is known all the same."""
    found: Sequence[Budget] = [*budgets]
    counters = [
        counter_of(each.scope, each.scope_id, each.period, now.timestamp()) for each in found
    ]
    try:
        live = await spent_now(redis, org_id, counters)
    except (RedisError, OSError):
        live = {}
    return [
        msgspec.structs.replace(
            each,
            held_pico=max(0, live.get(counter, 0) * PICO_PER_NANO - each.used_pico),
            resets_at=counter.end,
        )
        for each, counter in zip(found, counters, strict=True)
    ]
