"""Changes versions and pins, and reads them with the rollouts. Each change stands in the operator's
audit log, and is heard of by every worker when it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7_hex
from gateway.registry.rollout import ACTIVE, ModelRollout, RolloutProgress
from gateway.registry.tables import pins, rollouts, versions
from gateway.registry.version_table import (
    INSTALLATION,
    ModelPin,
    PinScope,
    RegisteredVersion,
    VersionTable,
)
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from gateway.tenancy.tables import api_keys, orgs, projects

MAX_VERSIONS = 1000
MAX_PINS = 100_000
ONE_AT_A_TIME = sa.text("SELECT pg_advisory_xact_lock(hashtextextended('model versions', 0))")
SCOPED: Mapping[PinScope, sa.Table] = {"org": orgs, "project": projects, "key": api_keys}
SHOWN_DIGITS = 12
"""A message shows so many digits of a digest."""

Check = Callable[[Any], None]
"""Raises what keeps a row, as it is under its lock, from being changed (`If-Match`)."""


async def read_table(conn: AsyncConnection) -> VersionTable:
    """Return all versions, pins and rollouts as they are now."""
    found = [to_version(row) for row in await conn.execute(sa.select(versions))]
    if not found:
        return VersionTable()
    pinned = [to_pin(row) for row in await conn.execute(sa.select(pins))]
    return VersionTable(found, pinned, await read_active(conn))


def to_version(row: sa.Row[Any]) -> RegisteredVersion:
    return RegisteredVersion(**row._mapping)


def to_pin(row: sa.Row[Any]) -> ModelPin:
    return ModelPin(**row._mapping)


def to_rollout(row: sa.Row[Any]) -> ModelRollout:
    values = {**row._mapping, "steps": tuple(row.steps)}
    values["progress"] = msgspec.msgpack.decode(row.progress, type=RolloutProgress)
    return ModelRollout(**values)


async def read_active(conn: AsyncConnection) -> list[ModelRollout]:
    """Return the rollouts that are under way."""
    asked = sa.select(rollouts).where(rollouts.c.state.in_(ACTIVE))
    return [to_rollout(row) for row in await conn.execute(asked)]


async def check_none_active(conn: AsyncConnection, model: str, field: str) -> None:
    """Refuse what a rollout of the model decides. Raises: Conflict."""
    asked = sa.select(rollouts.c.id).where(rollouts.c.model == model, rollouts.c.state.in_(ACTIVE))
    if found := await conn.scalar(asked):
        raise Conflict(field, f"the rollout {found} of {model!r} is under way")


async def add_version(
    conn: AsyncConnection,
    *,
    model: str,
    served_by: str,
    digests: Mapping[str, str],
    operator_org: str,
    actor: Actor,
) -> RegisteredVersion:
    """Register a served model as the next version of another. The first version is the model
    itself. `digests`: of both, by name. Raises: InvalidField, Conflict."""
    await conn.execute(ONE_AT_A_TIME)
    rows = [to_version(row) for row in await conn.execute(sa.select(versions))]
    if len(rows) >= MAX_VERSIONS:
        raise InvalidField("model", f"there may be {MAX_VERSIONS} versions")
    known = [each for each in rows if each.model == model]
    wanted = [served_by] if known or served_by == model else [model, served_by]
    number = max((each.version for each in known), default=0)
    made: list[RegisteredVersion] = []
    for name in wanted:
        check_new(name, digests[name], model, [*rows, *made])
        number += 1
        added = sa.insert(versions).values(
            id=f"mver_{uuid7_hex()}",
            model=model,
            version=number,
            served_by=name,
            digest=digests[name],
        )
        made.append(to_version((await conn.execute(added.returning(versions))).one()))
        await record(
            conn,
            org_id=operator_org,
            actor=actor,
            action="model_version.created",
            target=made[-1].id,
            after=shown(made[-1]),
        )
    return made[-1]


def check_new(served_by: str, digest: str, model: str, known: list[RegisteredVersion]) -> None:
    """Raises: Conflict."""
    for each in known:
        if each.served_by == served_by:
            raise Conflict(
                "served_by", f"{served_by!r} is version {each.version} of {each.model!r} already"
            )
        if each.model == model and each.digest == digest:
            raise Conflict(
                "served_by",
                f"{served_by!r} has the digest {digest[:SHOWN_DIGITS]}... of version"
                f" {each.version} of {model!r}, which {each.served_by!r} serves",
            )
        if each.model == served_by or each.served_by == model != each.model:
            raise Conflict("served_by", f"{each.served_by!r} is a version of {each.model!r}")


async def remove_version(
    conn: AsyncConnection, version_id: str, *, operator_org: str, actor: Actor, check: Check
) -> RegisteredVersion:
    """Forget a version that nobody is pinned to; the model itself last. Raises: NotFound,
    Conflict, and what `check` raises."""
    await conn.execute(ONE_AT_A_TIME)
    found = await get_version(conn, version_id)
    check(found)
    await check_none_active(conn, found.model, "version")
    pinned = sa.select(sa.func.count()).select_from(pins)
    pinned = pinned.where(pins.c.model == found.model, pins.c.version == found.version)
    if number := await conn.scalar(pinned):
        raise Conflict("version", f"{number} pins lead to version {found.version}")
    others = sa.select(sa.func.count()).select_from(versions).where(versions.c.model == found.model)
    if found.served_by == found.model and (await conn.scalar(others) or 0) > 1:
        raise Conflict("version", f"{found.model!r} itself is the last version to be removed")
    await conn.execute(sa.delete(versions).where(versions.c.id == version_id))
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="model_version.deleted",
        target=found.id,
        before=shown(found),
    )
    return found


async def get_version(conn: AsyncConnection, version_id: str) -> RegisteredVersion:
    """Raises: NotFound."""
    asked = sa.select(versions).where(versions.c.id == version_id)
    row = (await conn.execute(asked)).one_or_none()
    if row is None:
        raise NotFound("version_id", f"no version {version_id!r}")
    return to_version(row)


async def find_version(conn: AsyncConnection, model: str, number: int) -> RegisteredVersion:
    """Raises: NotFound."""
    asked = sa.select(versions).where(versions.c.model == model, versions.c.version == number)
    row = (await conn.execute(asked)).one_or_none()
    if row is None:
        raise NotFound("version", f"{model!r} has no version {number}")
    return to_version(row)


async def set_pin(
    conn: AsyncConnection,
    *,
    model: str,
    scope: PinScope,
    scope_id: str,
    version: int,
    operator_org: str,
    actor: Actor,
) -> ModelPin:
    """Pin a scope to a version, in place of the one that it had. Raises: InvalidField, NotFound,
    Conflict."""
    await conn.execute(ONE_AT_A_TIME)
    await find_version(conn, model, version)
    await check_scope(conn, scope, scope_id)
    if scope == "installation":
        await check_none_active(conn, model, "scope")
    same = (pins.c.model == model, pins.c.scope == scope, pins.c.scope_id == scope_id)
    row = (await conn.execute(sa.select(pins).where(*same))).one_or_none()
    before = None if row is None else to_pin(row)
    wanted: sa.Update | sa.Insert
    if before is None and scope != "installation":  # of those each model has one at most
        if (await conn.scalar(sa.select(sa.func.count()).select_from(pins)) or 0) >= MAX_PINS:
            raise InvalidField("model", f"there may be {MAX_PINS} pins")
    if before is None:
        values = {"id": f"mpin_{uuid7_hex()}", "model": model, "scope": scope}
        wanted = sa.insert(pins).values(**values, scope_id=scope_id, version=version)
    else:
        wanted = sa.update(pins).where(*same).values(version=version)
    pin = to_pin((await conn.execute(wanted.returning(pins))).one())
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="model_pin.created" if before is None else "model_pin.updated",
        target=pin.id,
        before=None if before is None else shown(before),
        after=shown(pin),
    )
    return pin


async def check_scope(conn: AsyncConnection, scope: PinScope, scope_id: str) -> None:
    """Raises: InvalidField, NotFound."""
    table = SCOPED.get(scope)
    if table is None:
        if scope_id != INSTALLATION:
            raise InvalidField("scope_id", "the whole installation has none")
        return
    if await conn.scalar(sa.select(table.c.id).where(table.c.id == scope_id)) is None:
        raise NotFound("scope_id", f"no {scope} {scope_id!r}")


async def get_pin(conn: AsyncConnection, pin_id: str) -> ModelPin:
    """Raises: NotFound."""
    row = (await conn.execute(sa.select(pins).where(pins.c.id == pin_id))).one_or_none()
    if row is None:
        raise NotFound("pin_id", f"no pin {pin_id!r}")
    return to_pin(row)


async def remove_pin(
    conn: AsyncConnection, pin_id: str, *, operator_org: str, actor: Actor, check: Check
) -> ModelPin:
    """Raises: NotFound, and what `check` raises."""
    await conn.execute(ONE_AT_A_TIME)
    found = await get_pin(conn, pin_id)
    check(found)
    if found.scope == "installation":
        await check_none_active(conn, found.model, "scope")
    await conn.execute(sa.delete(pins).where(pins.c.id == pin_id))
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="model_pin.deleted",
        target=pin_id,
        before=shown(found),
    )
    return found


def shown(row: msgspec.Struct) -> dict[str, Any]:
    """Return a row as the audit log shows it."""
    found = msgspec.structs.asdict(row)
    return {name: value for name, value in found.items() if name not in ("id", "created_at")}
