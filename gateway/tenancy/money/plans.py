"""Plans: the named limits that settings give and orgs, projects and keys refer to.

Of the plans in the settings the settings are the truth, the table is their copy, and nobody changes
them here; the others are made by operators. Plans are the installation's: what happens to one
stands in the operator's audit log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import SETTINGS, Actor, record
from gateway.principal import (
    KEY_LIMIT_NAMES,
    LIMIT_NAMES,
    MAX_LIMIT,
    UNLIMITED,
    CapScope,
    Plan,
)
from gateway.tenancy.changes import EVERYTHING, changing, unchecked
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound, ReadOnly
from gateway.tenancy.tables import api_keys, check_name, orgs, plans, projects

MAX_HOLDERS = 20
"""The holders of a plan that are listed."""
PLAN_FIELDS = Plan.__struct_fields__
"""The names of a plan's limits, lane, weight and price list."""


def plan_columns(owner: str, plan: sa.FromClause) -> list[sa.ColumnElement[Any]]:
    """Select the columns of the joined `plan` of `owner`, for `plan_of`."""
    return [plan.c[field].label(f"{owner}_plan_{field}") for field in PLAN_FIELDS]


def plan_of(owner: str, values: Mapping[str, Any] | sa.RowMapping) -> Plan:
    """Read the plan that `plan_columns` selected; an owner without a plan is unlimited."""
    if values[f"{owner}_plan_name"] is None:
        return UNLIMITED
    return Plan(**{field: values[f"{owner}_plan_{field}"] for field in PLAN_FIELDS})


class PlanRow(Plan, frozen=True, kw_only=True):
    """A plan as operators see it."""

    in_settings: bool
    """It follows the settings file."""
    created_at: datetime
    archived_at: datetime | None


Check = Callable[[PlanRow], None]
"""Raises what keeps the row, as it stands under its lock, from being changed."""


class PlanChange(msgspec.Struct, frozen=True):
    """A change that the settings made to one plan; `before` None: it is new."""

    action: str
    name: str
    before: dict[str, Any] | None
    after: dict[str, Any]


async def sync_plans(conn: AsyncConnection, wanted: Sequence[Plan]) -> list[PlanChange]:
    """Make the table say what `wanted` says; returns what that changed, for `record_changes`. A
    plan that is gone from it is archived: its limits go on to bind what refers to it, and it can no
    longer be given. Workers see new limits within `auth.bearer.api_keys.REFRESH_S`.

    Raises: InvalidField.
    """
    rows = await conn.execute(sa.select(plans).with_for_update())
    known = {row.name: dict(row._mapping) for row in rows}
    changes: list[PlanChange] = []
    for plan in wanted:
        check_name(plan.name)
        for limit in LIMIT_NAMES:
            value = getattr(plan, limit)
            if value is not None and not 0 <= value <= MAX_LIMIT:
                raise InvalidField(f"plan.{plan.name}.{limit}", f"must be 0 to {MAX_LIMIT}")
        row = {field: getattr(plan, field) for field in PLAN_FIELDS}
        row |= {"archived_at": None, "in_settings": True}
        upsert = insert(plans).values(**row)
        await conn.execute(upsert.on_conflict_do_update(index_elements=["name"], set_=row))
        before = known.get(plan.name)
        if before is None:
            changes.append(PlanChange("plan.created", plan.name, None, row))
        elif differing := {key: row[key] for key in row if row[key] != before[key]}:
            was = {key: before[key] for key in differing}
            changes.append(PlanChange("plan.updated", plan.name, was, differing))
    gone = sa.update(plans).where(
        plans.c.name.not_in([plan.name for plan in wanted]),
        plans.c.in_settings,
        plans.c.archived_at.is_(None),
    )
    ended = gone.values(archived_at=sa.func.now()).returning(plans.c.name, plans.c.archived_at)
    for name, archived_at in await conn.execute(ended):
        after = {"archived_at": archived_at}
        changes.append(PlanChange("plan.archived", name, {"archived_at": None}, after))
    return changes


async def record_changes(
    conn: AsyncConnection, changes: Sequence[PlanChange], *, operator_org: str
) -> None:
    """Record the changes in the transaction that made them."""
    for each in changes:
        await record(
            conn,
            org_id=operator_org,
            actor=SETTINGS,
            action=each.action,
            target=each.name,
            before=each.before,
            after=each.after,
        )


async def check_price_lists(conn: AsyncConnection, known: Collection[str]) -> None:
    """Check that every plan names one of those that are `known`. Raises: InvalidField."""
    named = sa.select(plans.c.name, plans.c.price_list).where(plans.c.price_list.is_not(None))
    for name, price_list in await conn.execute(named.order_by(plans.c.name)):
        check_price_list(price_list, known, param=f"plan.{name}.price_list")


def check_price_list(
    price_list: str | None, known: Collection[str], *, param: str = "price_list"
) -> None:
    """Raises: InvalidField."""
    if price_list is not None and price_list not in known:
        raise InvalidField(param, f"no price book names a price list {price_list!r}")


async def create_plan(
    conn: AsyncConnection,
    *,
    name: str,
    values: Mapping[str, Any],
    operator_org: str,
    actor: Actor,
) -> PlanRow:
    """Create a plan; `values`: limits, lane, price_list. Raises: InvalidField, NameTaken."""
    row = {"name": check_name(name), "in_settings": False, **values}
    added = insert(plans).values(**row).on_conflict_do_nothing().returning(plans)
    made = (await conn.execute(added)).one_or_none()
    if made is None:
        raise NameTaken("name", f"there is, or was, a plan {name!r}")
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="plan.created",
        target=name,
        after=dict(values),
    )
    return PlanRow(**made._mapping)


async def get_plan(conn: AsyncConnection, name: str) -> PlanRow:
    """A live or an archived one. Raises: NotFound."""
    return _to_row((await conn.execute(sa.select(plans).where(plans.c.name == name))).first(), name)


async def update_plan(
    db: AsyncEngine,
    redis: Redis,
    name: str,
    values: Mapping[str, Any],
    *,
    operator_org: str,
    actor: Actor,
    check: Check = unchecked,
) -> PlanRow:
    """Update a plan; every worker goes by it within a second.

    Raises: NotFound, ReadOnly, ChangeNotAnnounced, and what `check` raises.
    """
    async with changing(db, redis, EVERYTHING, org_id=operator_org) as conn:
        before = await _hold_plan(conn, name, check)
        if before.archived_at is not None:
            raise ReadOnly("plan", "an archived plan cannot be changed")
        changed = {key: value for key, value in values.items() if getattr(before, key) != value}
        if not changed:
            return before
        return await _change(conn, before, changed, "plan.updated", operator_org, actor)


async def archive_plan(
    db: AsyncEngine,
    redis: Redis,
    name: str,
    *,
    operator_org: str,
    actor: Actor,
    check: Check = unchecked,
) -> PlanRow:
    """Archive a plan: it can no longer be given; whom it was given to, it goes on to bind.
    Idempotent.

    Raises: NotFound, ReadOnly, ChangeNotAnnounced, and what `check` raises.
    """
    async with changing(db, redis, EVERYTHING, org_id=operator_org) as conn:
        before = await _hold_plan(conn, name, check)
        if before.archived_at is not None:
            return before
        moment = {"archived_at": sa.func.now()}
        return await _change(conn, before, moment, "plan.archived", operator_org, actor)


async def _hold_plan(conn: AsyncConnection, name: str, check: Check) -> PlanRow:
    found = sa.select(plans).where(plans.c.name == name).with_for_update()
    row = _to_row((await conn.execute(found)).first(), name)
    check(row)
    if row.in_settings:
        raise ReadOnly("plan", "this plan stands in the settings file, and is changed there")
    return row


async def _change(
    conn: AsyncConnection,
    before: PlanRow,
    values: Mapping[str, Any],
    action: str,
    operator_org: str,
    actor: Actor,
) -> PlanRow:
    changed = sa.update(plans).where(plans.c.name == before.name).values(**values)
    after = PlanRow(**(await conn.execute(changed.returning(plans))).one()._mapping)
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action=action,
        target=before.name,
        before={key: getattr(before, key) for key in values},
        after={key: getattr(after, key) for key in values},
    )
    return after


def _to_row(row: sa.Row[Any] | None, name: str) -> PlanRow:
    """Raises: NotFound."""
    if row is None:
        raise NotFound("plan", f"no plan {name!r}")
    return PlanRow(**row._mapping)


class PlanHolder(msgspec.Struct, frozen=True, kw_only=True):
    """An org, project or key that is on a plan."""

    scope: CapScope
    id: str
    name: str
    own: dict[str, int | None]
    """The limits that a key has of its own, within those of the plan."""


async def list_holders(
    conn: AsyncConnection, *, org_id: str, plan: str, limit: int = MAX_HOLDERS
) -> list[PlanHolder]:
    """Return who of an org is on a plan: the org itself, its projects, then its keys, by name."""
    none = [sa.null().cast(sa.BigInteger).label(name) for name in KEY_LIMIT_NAMES]
    parts: list[tuple[int, CapScope, sa.Table, Sequence[sa.ColumnElement[Any]]]] = [
        (0, "org", orgs, none),
        (1, "project", projects, none),
        (2, "key", api_keys, [api_keys.c[name] for name in KEY_LIMIT_NAMES]),
    ]
    alive = {
        "org": orgs.c.id == org_id,
        "project": sa.and_(projects.c.org_id == org_id, projects.c.archived_at.is_(None)),
        "key": sa.and_(api_keys.c.org_id == org_id, api_keys.c.revoked_at.is_(None)),
    }
    found = sa.union_all(
        *(
            sa.select(
                sa.literal(place).label("place"),
                sa.literal(scope).label("scope"),
                table.c.id,
                table.c.name,
                *own,
            ).where(table.c.plan == plan, alive[scope])
            for place, scope, table, own in parts
        )
    )
    rows = await conn.execute(found.order_by("place", "name", "id").limit(limit))
    return [
        PlanHolder(
            scope=row.scope,
            id=row.id,
            name=row.name,
            own={name: getattr(row, name) for name in KEY_LIMIT_NAMES},
        )
        for row in rows
    ]
