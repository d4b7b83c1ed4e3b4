"""Spend caps: what an org, a project or a key may spend in a day, a month (UTC) or in all; and of a
model or a tag what its org wants to be told of.

The limiter holds requests to hard caps; a soft one refuses nothing, it is there to be told of; what
is spent of either when it is made or changed is told of at once. Money is pico-USD at rest; a hard
cap is nano-USD on its way to Redis, whose numbers are exact to MAX_AMOUNT_PICO. What the operator
has set a tenant does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.alerts import raise_for_cap
from billing.money import PICO_PER_USD, Pico
from gateway.audit.log import Actor, record_for_both
from gateway.ids import uuid7
from gateway.principal import CapPeriod, CapScope, SpendCap
from gateway.tenancy.changes import changing, unchecked
from gateway.tenancy.errors import Conflict, InvalidField, NotFound, ReadOnly
from gateway.tenancy.tables import api_keys, orgs, projects, spend_caps

PICO_PER_NANO = 1000
MAX_AMOUNT_PICO = 9_000_000 * PICO_PER_USD
"""Below 2^53 nano-USD, up to which Lua counts exactly."""
MAX_CAPS = 10_000
"""Live ones of an org."""
VALUES = ("amount_pico", "hard")


class SpendCapRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    project_id: str | None
    key_id: str | None
    model: str | None
    tag: str | None
    """`key=value`."""
    scope: CapScope | Literal["model", "tag"]
    period: CapPeriod
    amount_pico: Pico
    hard: bool
    """False: it refuses nothing."""
    by_operator: bool
    created_at: datetime
    archived_at: datetime | None


Check = Callable[[SpendCapRow], None]
"""Raises what keeps the row, as it stands under its lock, from being changed."""


def hard_caps(
    org_id: sa.ColumnElement[Any],
    project_id: sa.ColumnElement[Any],
    key_id: sa.ColumnElement[Any] | None = None,
) -> sa.ColumnElement[Any]:
    """One more column of the query that authenticates, for `to_spend_caps`; NULL: none."""
    own = spend_caps.c
    owners = [own.scope == "org", own.project_id == project_id]
    if key_id is not None:
        owners.append(own.key_id == key_id)
    owner = sa.func.coalesce(own.key_id, own.project_id, own.org_id)
    cap = sa.func.jsonb_build_array(own.scope, owner, own.period, own.amount_pico)
    found = sa.select(sa.func.jsonb_agg(cap, type_=JSONB)).where(own.org_id == org_id)
    found = found.where(own.hard, own.archived_at.is_(None), sa.or_(*owners))
    return found.correlate_except(spend_caps).scalar_subquery()


def to_spend_caps(
    found: Iterable[tuple[CapScope, str, CapPeriod, int]] | None,
    org_id: str,
    is_prepaid: bool,
) -> tuple[SpendCap, ...]:
    """Return the caps in an order that does not change."""
    caps = [
        SpendCap(scope, owner_id, period, int(amount_pico) // PICO_PER_NANO)
        for scope, owner_id, period, amount_pico in found or ()
    ]
    if is_prepaid:
        most = MAX_AMOUNT_PICO // PICO_PER_NANO
        caps.append(SpendCap("org", org_id, "total", most, is_funded=True))
    return tuple(sorted(caps, key=lambda cap: (cap.scope, cap.period, cap.amount_nano)))


async def create_spend_cap(
    db: AsyncEngine,
    redis: Redis,
    *,
    org_id: str,
    project_id: str | None = None,
    key_id: str | None = None,
    model: str | None = None,
    tag: str | None = None,
    period: CapPeriod = "month",
    amount_pico: Pico = 0,
    hard: bool = True,
    by_operator: bool = False,
    operator_org: str | None = None,
    actor: Actor,
) -> SpendCapRow:
    """Create a cap of the org, or of one project, key, model or tag. Every worker goes by it within
    a second.

    Raises: InvalidField, NotFound (org, project, key), Conflict, ChangeNotAnnounced.
    """
    if project_id is not None and key_id is not None:
        raise InvalidField("key_id", "a cap is of a project or of a key")
    if model is not None and (project_id is not None or key_id is not None):
        raise InvalidField("model", "a cap is of a project, of a key or of a model")
    if tag is not None and (project_id is not None or key_id is not None or model is not None):
        raise InvalidField("tag", "a cap is of a project, of a key, of a model or of a tag")
    _check_hardness(model or tag, hard)
    check_amount("amount_usd", amount_pico)
    subject = key_id or project_id or org_id
    async with changing(db, redis, subject, org_id=org_id) as conn:
        return await add_spend_cap(
            conn,
            org_id=org_id,
            project_id=project_id,
            key_id=key_id,
            model=model,
            tag=tag,
            period=period,
            amount_pico=amount_pico,
            hard=hard,
            by_operator=by_operator,
            operator_org=operator_org,
            actor=actor,
        )


async def add_spend_cap(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str | None = None,
    key_id: str | None = None,
    model: str | None = None,
    tag: str | None = None,
    period: CapPeriod = "month",
    amount_pico: Pico = 0,
    hard: bool = True,
    by_operator: bool = False,
    operator_org: str | None = None,
    actor: Actor,
) -> SpendCapRow:
    """Add a cap whose values have been checked; to be announced.

    Raises: InvalidField, NotFound (org, project, key), Conflict.
    """
    await _lock_owner(conn, org_id=org_id, project_id=project_id, key_id=key_id)
    live = sa.select(sa.func.count()).select_from(spend_caps)
    live = live.where(spend_caps.c.org_id == org_id, spend_caps.c.archived_at.is_(None))
    if (await conn.scalar(live) or 0) >= MAX_CAPS:
        raise InvalidField("org_id", f"there are {MAX_CAPS} caps already")
    row = {
        "id": f"cap_{uuid7().hex}",
        "org_id": org_id,
        "project_id": project_id,
        "key_id": key_id,
        "model": model,
        "tag": tag,
        "period": period,
        "amount_pico": amount_pico,
        "hard": hard,
        "by_operator": by_operator,
    }
    added = insert(spend_caps).values(**row).on_conflict_do_nothing().returning(spend_caps)
    made = (await conn.execute(added)).one_or_none()
    if made is None:
        raise Conflict("period", "there is such a cap of this period already")
    cap = to_spend_cap(made)
    await raise_for_cap(conn, cap.id)
    await _log(
        conn, cap, operator_org, actor=actor, action="spend_cap.created", after=described(cap)
    )
    return cap


async def get_spend_cap(conn: AsyncConnection, *, org_id: str, cap_id: str) -> SpendCapRow:
    """A live or an archived one. Raises: NotFound."""
    return await _find(conn, org_id, cap_id, lock=False)


def select_spend_caps(org_id: str, *, archived: bool = False) -> sa.Select[Any]:
    """Select the live caps of an organization, or with `archived` all."""
    found = sa.select(spend_caps).where(spend_caps.c.org_id == org_id)
    return found if archived else found.where(spend_caps.c.archived_at.is_(None))


async def update_spend_cap(
    db: AsyncEngine,
    redis: Redis,
    cap_id: str,
    values: Mapping[str, Any],
    *,
    org_id: str,
    operator_org: str | None = None,
    actor: Actor,
    check: Check = unchecked,
) -> SpendCapRow:
    """Update a cap; `values`: amount_pico, hard. Every worker goes by it within a second.

    Raises: InvalidField, NotFound, ReadOnly, Conflict, ChangeNotAnnounced, and what `check`
    raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await _hold(conn, org_id, cap_id, check, operator_org)
        if before.archived_at is not None:
            raise ReadOnly("cap", "an archived cap cannot be changed")
        if "amount_pico" in values:
            check_amount("amount_usd", values["amount_pico"])
        _check_hardness(before.model or before.tag, values.get("hard", before.hard))
        changed = {
            name: value
            for name, value in values.items()
            if name in VALUES and getattr(before, name) != value
        }
        if not changed:
            return before
        if "hard" in changed and await _is_taken(conn, before, changed["hard"]):
            raise Conflict("hard", "there is such a cap of this period already")
        return await _change(conn, before, changed, "updated", operator_org, actor)


async def archive_spend_cap(
    db: AsyncEngine,
    redis: Redis,
    cap_id: str,
    *,
    org_id: str,
    operator_org: str | None = None,
    actor: Actor,
    check: Check = unchecked,
) -> SpendCapRow:
    """Archive a cap: it binds nobody any more. Idempotent.

    Raises: NotFound, ReadOnly, ChangeNotAnnounced, and what `check` raises.
    """
    async with changing(db, redis, org_id, org_id=org_id) as conn:
        before = await _hold(conn, org_id, cap_id, check, operator_org)
        if before.archived_at is not None:
            return before
        moment = {"archived_at": sa.func.now()}
        return await _change(conn, before, moment, "archived", operator_org, actor)


def described(cap: SpendCapRow) -> dict[str, Any]:
    """Describe a cap for the audit log."""
    fields = (
        *("project_id", "key_id", "model", "tag"),
        *("period", "amount_pico", "hard", "by_operator"),
    )
    return {name: _exact(getattr(cap, name)) for name in fields}


def _exact(value: Any) -> Any:
    """Return an amount as text: it may be more than a JSON number holds exactly."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def check_amount(field: str, amount_pico: Pico) -> None:
    """Raises: InvalidField."""
    if not 0 <= amount_pico <= MAX_AMOUNT_PICO or amount_pico % PICO_PER_NANO:
        most = MAX_AMOUNT_PICO // PICO_PER_USD
        raise InvalidField(field, f"must be 0 to {most}, with at most nine decimals")


def _check_hardness(told_of: str | None, hard: bool) -> None:
    """Check that a hard cap can be counted: the limiter has no counter of a model over all
    projects, nor of a tag."""
    if told_of is not None and hard:
        raise InvalidField("hard", "a cap of a model or a tag refuses nothing: it must be false")


async def _lock_owner(
    conn: AsyncConnection, *, org_id: str, project_id: str | None, key_id: str | None
) -> None:
    """Lock what a cap is of, so that it cannot be archived before this commits.

    Raises: NotFound.
    """
    live: sa.Select[Any]
    if key_id is not None:
        live = sa.select(api_keys.c.id).where(api_keys.c.org_id == org_id)
        live = live.where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
        kind, name = "key_id", key_id
    elif project_id is not None:
        live = sa.select(projects.c.id).where(projects.c.org_id == org_id)
        live = live.where(projects.c.id == project_id, projects.c.archived_at.is_(None))
        kind, name = "project_id", project_id
    else:
        live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
        kind, name = "org_id", org_id
    if await conn.scalar(live.with_for_update(read=True)) is None:
        raise NotFound(kind, f"there is no {name!r} here")


async def _find(conn: AsyncConnection, org_id: str, cap_id: str, *, lock: bool) -> SpendCapRow:
    found = sa.select(spend_caps).where(spend_caps.c.org_id == org_id, spend_caps.c.id == cap_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("cap_id", f"no spend cap {cap_id!r}")
    return to_spend_cap(row)


async def _hold(
    conn: AsyncConnection, org_id: str, cap_id: str, check: Check, operator_org: str | None
) -> SpendCapRow:
    row = await _find(conn, org_id, cap_id, lock=True)
    check(row)
    if row.by_operator and operator_org is None:
        raise ReadOnly("cap", "the operator of this installation has set it")
    return row


async def _is_taken(conn: AsyncConnection, cap: SpendCapRow, hard: bool) -> bool:
    own = spend_caps.c
    found = sa.select(own.id).where(
        own.org_id == cap.org_id,
        own.project_id.is_not_distinct_from(cap.project_id),
        own.key_id.is_not_distinct_from(cap.key_id),
        own.model.is_not_distinct_from(cap.model),
        own.tag.is_not_distinct_from(cap.tag),
        own.period == cap.period,
        own.hard == hard,
        own.by_operator == cap.by_operator,
        own.archived_at.is_(None),
    )
    return await conn.scalar(found) is not None


async def _change(
    conn: AsyncConnection,
    before: SpendCapRow,
    values: Mapping[str, Any],
    what: Literal["updated", "archived"],
    operator_org: str | None,
    actor: Actor,
) -> SpendCapRow:
    own = spend_caps.c
    changed = sa.update(spend_caps).where(own.org_id == before.org_id, own.id == before.id)
    after = to_spend_cap((await conn.execute(changed.values(**values).returning(spend_caps))).one())
    if what == "updated":
        await raise_for_cap(conn, after.id)
    await _log(
        conn,
        after,
        operator_org,
        actor=actor,
        action=f"spend_cap.{what}",
        before={name: _exact(getattr(before, name)) for name in values},
        after={name: _exact(getattr(after, name)) for name in values},
    )
    return after


async def _log(
    conn: AsyncConnection, cap: SpendCapRow, operator_org: str | None, **entry: Any
) -> None:
    await record_for_both(
        conn,
        org_id=cap.org_id,
        operator_org=operator_org,
        project_id=cap.project_id,
        target=cap.id,
        **entry,
    )


def to_spend_cap(row: sa.Row[Any]) -> SpendCapRow:
    fields = dict(row._mapping)
    amount: Decimal = fields.pop("amount_pico")
    return SpendCapRow(**fields, amount_pico=int(amount))
