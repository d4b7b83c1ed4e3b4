"""Plans: the named limits that settings give and orgs, projects and keys refer to.

Above: `bootstrap`, at each start. Below: `tables`. Of the plans in the settings the settings are
the truth, the table is their copy; the others are made by operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.principal import Plan
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.tables import check_name, plans

LIMITS = ("tokens_per_minute", "requests_per_minute", "max_concurrent_streams")
MAX_LIMIT = 1_000_000_000_000


async def sync_plans(conn: AsyncConnection, wanted: Sequence[Plan]) -> None:
    """Make the table say what `wanted` says. A plan that is gone from it is archived: its limits
    go on to bind what refers to it, and it can no longer be given. Workers see new limits within
    `auth.api_keys.REFRESH_S`.

    Raises: InvalidField.
    """
    for plan in wanted:
        check_name(plan.name)
        for limit in LIMITS:
            value = getattr(plan, limit)
            if value is not None and not 0 <= value <= MAX_LIMIT:
                raise InvalidField(f"plan.{plan.name}.{limit}", f"must be 0 to {MAX_LIMIT}")
        row = {limit: getattr(plan, limit) for limit in LIMITS}
        row |= {"archived_at": None, "in_settings": True}
        upsert = insert(plans).values(name=plan.name, **row)
        await conn.execute(upsert.on_conflict_do_update(index_elements=["name"], set_=row))
    gone = sa.update(plans).where(
        plans.c.name.not_in([plan.name for plan in wanted]),
        plans.c.in_settings,
        plans.c.archived_at.is_(None),
    )
    await conn.execute(gone.values(archived_at=sa.func.now()))
