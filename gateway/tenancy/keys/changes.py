"""Changes an API key after it was made: updates it, rotates it, takes a report that it leaked.

A rotated key stays the same key, with its id, its limits and its bill: its new secret is good at
once, the one before it until a grace period is over. There are never more than two: rotating again
ends the older one.

`check` is called with the row as it stands under its lock, before anything changes; what it raises
ends the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.principal import Principal
from gateway.tenancy.changes import changing, unchecked
from gateway.tenancy.delegation import check_changed, check_secret
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.keys import (
    ADMIN_PREFIX,
    CreatedKey,
    KeyRow,
    check_expiry,
    check_scopes,
    end_key,
    hash_key,
    new_secret,
    power_of,
    prefix_of,
    public_columns,
    retrieve_key,
)
from gateway.tenancy.keys.restrictions import Restrictions, check_restrictions, merged_limits
from gateway.tenancy.tables import api_keys, check_name, check_plan

MAX_GRACE_S = 30 * 86_400
DEFAULT_GRACE_S = 86_400
CHANGEABLE = frozenset({"name", "scopes", "plan", "expires_at", *Restrictions.__struct_fields__})

Check = Callable[[KeyRow], None]
Hashes = Sequence[tuple[str, str]]
"""(pepper id, hash under that pepper)."""


async def update_key(
    db: AsyncEngine,
    redis: Redis,
    key_id: str,
    changes: Mapping[str, Any],
    *,
    org_id: str,
    actor: Actor,
    check: Check = unchecked,
    by: Principal | None = None,
) -> KeyRow:
    """Update a key; `changes`: some of CHANGEABLE; every worker goes by them within a second. `by`:
    who asks, as `create_key` has it.

    Raises: InvalidField, NotFound (key, plan), NotAllowed, ChangeNotAnnounced.
    """
    assert CHANGEABLE.issuperset(changes)
    async with changing(db, redis, key_id, org_id=org_id) as conn:
        before = await retrieve_key(conn, key_id, org_id=org_id, lock=True)
        check(before)
        require_live(before)
        values = await _checked(conn, before, changes)
        if by is not None:
            known = msgspec.structs.asdict(before)
            check_changed(by, key_id, power_of(known), power_of(known | values))
        if not values:
            return before
        changed = sa.update(api_keys).where(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
        made = await conn.execute(changed.values(**values).returning(*public_columns()))
        after = KeyRow(**made.one()._mapping)
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="api_key.updated",
            target=key_id,
            before={name: getattr(before, name) for name in values},
            after={name: getattr(after, name) for name in values},
            project_id=before.project_id,
        )
    return after


async def _checked(
    conn: AsyncConnection, before: KeyRow, changes: Mapping[str, Any]
) -> dict[str, Any]:
    values = dict(changes)
    if "name" in values:
        values["name"] = check_name(values["name"])
    if "scopes" in values:
        values["scopes"] = check_scopes(values["scopes"])
        if prefix_of(values["scopes"]) != before.prefix:
            kind = "only" if before.prefix == ADMIN_PREFIX else "no"
            raise InvalidField("scopes", f"this key can hold {kind} scopes of administration")
    if "plan" in values:
        values["plan"] = await check_plan(conn, values["plan"])
    if "expires_at" in values:
        check_expiry(values["expires_at"])
    if "model_limits" in values:
        values["model_limits"] = merged_limits(before.model_limits, values["model_limits"])
    own = {name: values[name] for name in Restrictions.__struct_fields__ if name in values}
    row = check_restrictions(Restrictions(**own))
    return values | {name: row[name] for name in own}


async def rotate_key(
    db: AsyncEngine,
    redis: Redis,
    key_id: str,
    *,
    org_id: str,
    pepper: bytes,
    pepper_id: str,
    grace_s: int = DEFAULT_GRACE_S,
    actor: Actor,
    check: Check = unchecked,
    by: Principal | None = None,
) -> CreatedKey:
    """A new secret for the key. The one until now is good for `grace_s` more; with 0 it ends at
    once. `by`: who will read the new one, as `create_key` has it.

    Raises: InvalidField, NotFound, NotAllowed; ChangeNotAnnounced: rotated, and the new secret is
    lost; rotate again.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidField("grace_s", f"must be 0 to {MAX_GRACE_S}")
    async with changing(db, redis, key_id, org_id=org_id) as conn:
        before = await retrieve_key(conn, key_id, org_id=org_id, lock=True)
        check(before)
        require_live(before)
        if before.for_console:
            raise InvalidField("key", "the console spends under it: nobody has its secret")
        if by is not None:
            check_secret(by, power_of(msgspec.structs.asdict(before)))
        secret = new_secret(before.prefix)
        kept = grace_s > 0
        grace = timedelta(seconds=grace_s)
        changed = sa.update(api_keys).where(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
        changed = changed.values(
            key_hash=hash_key(pepper, secret),
            pepper_id=pepper_id,
            last_four=secret[-4:],
            # On the right stands what was before.
            previous_hash=api_keys.c.key_hash if kept else None,
            previous_pepper_id=api_keys.c.pepper_id if kept else None,
            previous_hint=before.hint if kept else None,
            previous_expires_at=datetime.now(tz=UTC) + grace if kept else None,
        )
        made = await conn.execute(changed.returning(*public_columns()))
        after = KeyRow(**made.one()._mapping)
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="api_key.rotated",
            target=key_id,
            before={"redacted_value": before.hint},
            after={
                "redacted_value": after.hint,
                "previous_expires_at": after.previous_expires_at,
            },
            project_id=before.project_id,
        )
    return CreatedKey(row=after, secret=secret)


async def report_leak(db: AsyncEngine, redis: Redis, hashes: Hashes, *, actor: Actor) -> bool:
    """End a key for anybody who shows it, at once: nobody is asked, and a public secret is worth
    nothing more. A secret that was rotated away ends alone. `db` must see all orgs; `hashes`: of
    the key, under every pepper.

    Returns whether there is (or was) such a key. Raises: ChangeNotAnnounced.
    """
    current = sa.tuple_(api_keys.c.pepper_id, api_keys.c.key_hash).in_(hashes)
    previous = sa.tuple_(api_keys.c.previous_pepper_id, api_keys.c.previous_hash).in_(hashes)
    async with db.connect() as conn:
        found = sa.select(api_keys.c.org_id, api_keys.c.id).where(sa.or_(current, previous))
        row = (await conn.execute(found)).one_or_none()
    if row is None:
        return False
    async with changing(db, redis, row.id, org_id=row.org_id) as conn:
        before = await retrieve_key(conn, row.id, org_id=row.org_id, lock=True)
        this = api_keys.c.id == row.id
        # Under the lock once more: it may have been rotated since.
        if await conn.scalar(sa.select(api_keys.c.id).where(this, current)) is not None:
            await end_key(conn, before, actor=actor, why="leak reported")
            return True
        gone = dict.fromkeys(
            ("previous_hash", "previous_pepper_id", "previous_hint", "previous_expires_at")
        )
        ended = await conn.execute(sa.update(api_keys).where(this, previous).values(**gone))
        if ended.rowcount:
            await record(
                conn,
                org_id=before.org_id,
                actor=actor,
                action="api_key.updated",
                target=before.id,
                before={"previous_expires_at": before.previous_expires_at},
                after={"previous_expires_at": None, "reason": "leak reported"},
                project_id=before.project_id,
            )
    return True


def require_live(row: KeyRow) -> None:
    """Raises: InvalidField."""
    if row.revoked_at is not None:
        raise InvalidField("key", "it is revoked")
    if row.expires_at is not None and row.expires_at <= datetime.now(tz=UTC):
        raise InvalidField("key", "it has expired")
