"""Starts rollouts, changes them as operators want or as what was seen of them says, and keeps how
requests end. Each change stands in the operator's audit log; one that moves somebody is heard of by
every worker when it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query
from gateway.audit.log import Actor, record
from gateway.ids import uuid7_hex
from gateway.registry.changes import (
    ONE_AT_A_TIME,
    Check,
    check_none_active,
    find_version,
    set_pin,
    to_rollout,
)
from gateway.registry.comparison import Outcomes
from gateway.registry.evaluations import check_passed
from gateway.registry.rollout import (
    MOST_AT_LEAST,
    WATCHED,
    ModelRollout,
    RolloutProgress,
    Seen,
    check_steps,
    look,
)
from gateway.registry.tables import outcomes, pins, rollouts, versions
from gateway.registry.version_table import INSTALLATION
from gateway.tenancy.errors import Conflict, InvalidField, NotFound

DECIDER = Actor(kind="system", id="rollout")
"""The actor of what becomes of a rollout by itself."""
TRY_LOCK = sa.text("SELECT pg_try_advisory_xact_lock(hashtextextended('model versions', 0))")
RECENT = timedelta(days=7)
COUNTED = Outcomes.__struct_fields__
SHOWN = ("model", "from_version", "to_version", "steps", "state", "step", "reason")


async def get_rollout(conn: AsyncConnection, rollout_id: str) -> ModelRollout:
    """Raises: NotFound."""
    row = (await conn.execute(sa.select(rollouts).where(rollouts.c.id == rollout_id))).one_or_none()
    if row is None:
        raise NotFound("rollout_id", f"no rollout {rollout_id!r}")
    return to_rollout(row)


def newest_query(*, is_wanted: bool = True) -> Query[tuple[ModelRollout, ...]]:
    """Return the query of the newest rollout of each model that began in the last days; of none,
    where that is not wanted."""
    newest = (
        sa.select(rollouts)
        .ext(distinct_on(rollouts.c.model))
        .where(rollouts.c.created_at > sa.func.now() - RECENT)
        .order_by(rollouts.c.model, rollouts.c.created_at.desc())
    )
    newest = newest if is_wanted else newest.where(sa.false())
    return Query(newest, lambda rows: tuple(map(to_rollout, rows)))


async def start_rollout(
    conn: AsyncConnection,
    *,
    model: str,
    version: int,
    steps: Sequence[int],
    least: int,
    watch: int,
    operator_org: str,
    actor: Actor,
    suites: Sequence[str] = (),
) -> ModelRollout:
    """Begin to give everybody a version who has no pin of their own. `suites`: the evaluations that
    it has to have passed. Raises: InvalidField, NotFound, Conflict."""
    await conn.execute(ONE_AT_A_TIME)
    check_steps(steps)
    for field, number, lowest in (("least", least, 1), ("watch", watch, 0)):
        if not lowest <= number <= MOST_AT_LEAST:
            raise InvalidField(field, f"is {lowest} to {MOST_AT_LEAST}")
    await check_passed(conn, await find_version(conn, model, version), suites)
    await check_none_active(conn, model, "model")
    before = await version_of_all(conn, model)
    if before == version:
        raise Conflict("version", f"everybody has version {version} of {model!r} already")
    values = {
        "id": f"mrol_{uuid7_hex()}",
        "operator_org": operator_org,
        "model": model,
        "from_version": before,
        "to_version": version,
        "steps": list(steps),
        "least": least,
        "watch": watch,
        "state": "running",
        "step": WATCHED if watch else 0,
        "reason": "",
        "progress": msgspec.msgpack.encode(RolloutProgress()),
    }
    added = sa.insert(rollouts).values(**values).returning(rollouts)
    made = to_rollout((await conn.execute(added)).one())
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="model_rollout.created",
        target=made.id,
        after=shown(made),
    )
    return made


async def version_of_all(conn: AsyncConnection, model: str) -> int:
    """Return the version of whoever has no pin of their own. Raises: NotFound."""
    pinned = sa.select(pins.c.version).where(
        pins.c.model == model, pins.c.scope == "installation", pins.c.scope_id == INSTALLATION
    )
    own = sa.select(versions.c.version).where(
        versions.c.model == model, versions.c.served_by == model
    )
    found = await conn.scalar(pinned) or await conn.scalar(own)
    if found is None:
        raise NotFound("model", f"{model!r} has no versions")
    return int(found)


async def change_rollout(
    conn: AsyncConnection,
    rollout_id: str,
    change: Callable[[ModelRollout], ModelRollout],
    *,
    actor: Actor,
    check: Check = lambda _: None,
) -> ModelRollout:
    """Change a rollout by an operator's will. Raises: NotFound, Conflict, what `check` raises."""
    await conn.execute(ONE_AT_A_TIME)
    before = await get_rollout(conn, rollout_id)
    check(before)
    after = change(before)
    await store(conn, before, after, actor)
    return after


async def look_at(
    conn: AsyncConnection, rollout_id: str, *, is_served: bool
) -> tuple[ModelRollout, ModelRollout] | None:
    """Let what was counted by now decide, and return the rollout before and after. None: another
    process looks, or changes something. `is_served`: whether the new version stands in the
    settings. Raises: NotFound."""
    if not await conn.scalar(TRY_LOCK):
        return None
    before = await get_rollout(conn, rollout_id)
    after = look(before, await counted(conn, before), is_served=is_served)
    await store(conn, before, after, DECIDER)
    return before, after


async def counted(conn: AsyncConnection, rollout: ModelRollout) -> Seen:
    """Return how requests ended at the steps so far."""
    asked = sa.select(outcomes).where(outcomes.c.rollout_id == rollout.id)
    found: dict[int, dict[int, Outcomes]] = {}
    for row in await conn.execute(asked):
        ended = Outcomes(**{name: getattr(row, name) for name in COUNTED})
        found.setdefault(row.step, {})[row.org_group] = ended
    return found


async def store(
    conn: AsyncConnection, before: ModelRollout, after: ModelRollout, actor: Actor
) -> None:
    """Store a rollout, in the operator's audit log if somebody is moved by it or will be. What is
    completed is everybody's version from then on."""
    if after is before:
        return
    values: dict[str, Any] = {"progress": msgspec.msgpack.encode(after.progress)}
    is_changed = (after.state, after.step) != (before.state, before.step)
    if is_changed:
        values.update(state=after.state, step=after.step, reason=after.reason)
    await conn.execute(sa.update(rollouts).where(rollouts.c.id == after.id).values(**values))
    if not is_changed:
        return
    if after.state == "completed":
        await set_pin(
            conn,
            model=after.model,
            scope="installation",
            scope_id=INSTALLATION,
            version=after.to_version,
            operator_org=after.operator_org,
            actor=actor,
        )
    await record(
        conn,
        org_id=after.operator_org,
        actor=actor,
        action="model_rollout.updated",
        target=after.id,
        before=shown(before),
        after={**shown(after), "seen": after.progress.as_seen},
    )


async def add_outcomes(
    conn: AsyncConnection, rollout: ModelRollout, taken: Mapping[int, Outcomes]
) -> None:
    """Add what ended in this process, by group, since it last did this."""
    if not taken:
        return
    rows = [  # in one order, so that two processes do not wait for each other
        {
            "rollout_id": rollout.id,
            "step": rollout.step,
            "org_group": group,
            **msgspec.structs.asdict(ended),
        }
        for group, ended in sorted(taken.items())
    ]
    added = insert(outcomes).values(rows)
    sums = {name: outcomes.c[name] + added.excluded[name] for name in COUNTED}
    await conn.execute(
        added.on_conflict_do_update(index_elements=["rollout_id", "step", "org_group"], set_=sums)
    )


def shown(rollout: ModelRollout) -> dict[str, Any]:
    """Return a rollout as the audit log shows it."""
    return {name: getattr(rollout, name) for name in SHOWN}
