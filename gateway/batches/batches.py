"""Stores batches: created, shown to their project, cancelled. Knows no line and no answer: a batch
is validated, run and written by whichever gateway comes first (`steward`, `runner`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from foundation.request_context import current_traceparent
from gateway.audit.log import Actor, record
from gateway.batches.sealing import METADATA
from gateway.batches.states import MESSAGES, may_cancel, shape_of
from gateway.batches.tables import batches
from gateway.files.files import BATCH, drop_file, get_file
from gateway.ids import uuid7_hex
from gateway.secret import Cipher
from gateway.tenancy.errors import InvalidField, NotFound, ReadOnly
from gateway.tenancy.projects import keeps_nothing
from gateway.wire.shared.batch import ENDED, Batch, Shape

PREFIX, MESSAGES_PREFIX = "batch_", "msgbatch_"
INPUT_FILE, REQUESTS = "input_file_id", "requests"
"""The field that holds a batch's requests, in OpenAI's and in Anthropic's shape."""
MESSAGE_BATCH_ID = "message_batch_id"
WINDOWS = {"24h": timedelta(hours=24)}
MAX_LIVE_PER_ORG = 200
"""An org may have this many batches that have not ended."""
FORGOTTEN_AT_ONCE = 100
_HOLD = sa.text("SELECT pg_advisory_xact_lock(hashtextextended('batches of ' || :org_id, 0))")


COLUMNS = [batches.c[name] for name in Batch.__struct_fields__]


async def create_batch(
    conn: AsyncConnection,
    cipher: Cipher,
    *,
    org_id: str,
    project_id: str,
    key_id: str,
    endpoint: str,
    input_file_id: str,
    completion_window: str = "24h",
    metadata: Mapping[str, str] | None = None,
    output_expires_after_s: int | None = None,
    num_total: int = 0,
    tags: Mapping[str, str] | None = None,
    actor: Actor,
) -> Batch:
    """Create a batch, to be validated and run, and return it as it is stored. `cipher`: for the
    purpose of batches. `num_total`: its lines, if they were counted as they came, as those of
    messages are, whose file is their caller's. Raises: InvalidField, NotFound (the file)."""
    is_ours = shape_of(endpoint) == "openai"
    if is_ours:
        await _check_input(conn, org_id, project_id, input_file_id)
    await _hold_room(conn, org_id, INPUT_FILE if is_ours else REQUESTS)
    row = {
        "id": f"{PREFIX if is_ours else MESSAGES_PREFIX}{uuid7_hex()}",
        "org_id": org_id,
        "project_id": project_id,
        "metadata": dict(metadata) if metadata else metadata,
    }
    added = sa.insert(batches).values(
        **{**row, **METADATA.seal(cipher, row)},
        key_id=key_id,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window=completion_window,
        output_expires_after_s=output_expires_after_s,
        num_total=num_total,
        tags=dict(tags) if tags else None,
        status="validating",
        traceparent=current_traceparent(),
        expires_at=sa.func.now() + WINDOWS[completion_window],
    )
    made = Batch(**(await conn.execute(added.returning(*COLUMNS))).one()._mapping)
    after = {"project_id": project_id, "endpoint": endpoint, "input_file_id": input_file_id}
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="batch.created",
        target=made.id,
        after=after,
        project_id=project_id,
    )
    return made


async def _check_input(
    conn: AsyncConnection, org_id: str, project_id: str, input_file_id: str
) -> None:
    file = await get_file(
        conn, org_id=org_id, project_id=project_id, file_id=input_file_id, field=INPUT_FILE
    )
    if file.purpose != BATCH:
        raise InvalidField(INPUT_FILE, "must be a file with the purpose 'batch'")


async def _hold_room(conn: AsyncConnection, org_id: str, field: str) -> None:
    """Hold room for one more until the end of the transaction. Raises: InvalidField."""
    await conn.execute(_HOLD, {"org_id": org_id})
    live = sa.select(sa.func.count()).where(
        batches.c.org_id == org_id, batches.c.status.not_in(ENDED)
    )
    if (await conn.scalar(live) or 0) >= MAX_LIVE_PER_ORG:
        most = f"an organization has at most {MAX_LIVE_PER_ORG} batches under way"
        raise InvalidField(field, most)


def select_batches(org_id: str, project_id: str, shape: Shape = "openai") -> sa.Select[Any]:
    """Select the batches of a project, for a page."""
    own = sa.and_(batches.c.org_id == org_id, batches.c.project_id == project_id)
    shaped = (batches.c.endpoint == MESSAGES) == (shape == "anthropic")
    return sa.select(*COLUMNS).where(own, shaped, batches.c.deleted_at.is_(None))


def to_batches(rows: Iterable[sa.Row[Any]]) -> list[Batch]:
    return [Batch(**row._mapping) for row in rows]


async def get_batch(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    batch_id: str,
    lock: bool = False,
    shape: Shape = "openai",
) -> Batch:
    """Raises: NotFound."""
    found = select_batches(org_id, project_id, shape).where(batches.c.id == batch_id)
    row = (
        await conn.execute(found.with_for_update(key_share=True) if lock else found)
    ).one_or_none()
    if row is None:
        raise NotFound("batch_id", f"no batch {batch_id!r}")
    return Batch(**row._mapping)


async def cancel_batch(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    batch_id: str,
    actor: Actor,
    shape: Shape = "openai",
) -> Batch:
    """Cancel a batch: nothing more of it begins; what runs ends, and is in its results. Idempotent.
    Raises: NotFound, ReadOnly (it has ended, or is about to)."""
    where = {"org_id": org_id, "project_id": project_id, "batch_id": batch_id}
    found = await get_batch(conn, **where, lock=True, shape=shape)
    if found.status in ("cancelling", "cancelled"):
        return found
    if not may_cancel(found.status):
        raise ReadOnly("batch_id", f"a batch that is {found.status} cannot be cancelled")
    changed = sa.update(batches).where(batches.c.org_id == org_id, batches.c.id == batch_id)
    changed = changed.values(status="cancelling", cancelling_at=sa.func.now())
    made = Batch(**(await conn.execute(changed.returning(*COLUMNS))).one()._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="batch.cancelled",
        target=batch_id,
        before={"project_id": project_id, "status": found.status},
        project_id=project_id,
    )
    return made


async def cancel_message_batch(
    conn: AsyncConnection, *, org_id: str, project_id: str, batch_id: str, actor: Actor
) -> Batch:
    """Cancel a batch: nothing more of it begins. If its results are written there is nothing left
    to cancel. Idempotent. Raises: NotFound, InvalidField (it has ended by itself)."""
    where = {"org_id": org_id, "project_id": project_id, "batch_id": batch_id}
    found = await get_batch(conn, **where, lock=True, shape="anthropic")
    if found.status in ("finalizing", "cancelled"):
        return found
    if found.status in ENDED:
        raise InvalidField(MESSAGE_BATCH_ID, "a batch that has ended cannot be canceled")
    return await cancel_batch(conn, **where, actor=actor, shape="anthropic")


async def delete_message_batch(
    conn: AsyncConnection, *, org_id: str, project_id: str, batch_id: str, actor: Actor
) -> None:
    """Delete a batch with its results. Raises: NotFound, InvalidField (it has not ended)."""
    where = {"org_id": org_id, "project_id": project_id}
    found = await get_batch(conn, **where, batch_id=batch_id, lock=True, shape="anthropic")
    if found.status not in ENDED:
        raise InvalidField(
            MESSAGE_BATCH_ID, "a batch is deleted once it has ended; cancel it first"
        )
    gone = sa.update(batches).where(batches.c.org_id == org_id, batches.c.id == batch_id)
    await conn.execute(gone.values(deleted_at=sa.func.now()))  # its row is swept by the runner
    if found.output_file_id is not None:
        await drop_file(conn, **where, file_id=found.output_file_id)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="batch.deleted",
        target=batch_id,
        before={"project_id": project_id, "status": found.status},
        project_id=project_id,
    )


# ---- the outbox of webhooks: of all orgs

_UNTOLD = sa.and_(batches.c.dispatched_at.is_(None), batches.c.status.in_(ENDED))


async def undispatched(conn: AsyncConnection, limit: int) -> list[Batch]:
    """Return the oldest that have ended and nobody was told of, for the caller to mark in this
    transaction."""
    found = sa.select(*COLUMNS).where(_UNTOLD).order_by(batches.c.id).limit(limit)
    return to_batches(await conn.execute(found.with_for_update(skip_locked=True)))


async def mark_dispatched(conn: AsyncConnection, batch_ids: Iterable[str]) -> None:
    told = sa.update(batches).where(batches.c.id.in_(list(batch_ids)))
    await conn.execute(told.values(dispatched_at=sa.func.now()))


async def forget_notes(conn: AsyncConnection) -> None:
    """Erase what was noted of batches that have ended, in projects that are archived or are to keep
    nothing. Of all orgs."""
    noted = (sa.func.jsonb_typeof(each) for each in (batches.c.metadata, batches.c.errors))
    erased = sa.update(batches).where(
        keeps_nothing(batches.c.org_id, batches.c.project_id),
        batches.c.status.in_(ENDED),
        sa.or_(*(kind != "null" for kind in noted)),
    )
    await conn.execute(erased.values(metadata=sa.null(), errors=sa.null()))


NEXT_FORGOTTEN = """
    SELECT now() FROM batches WHERE deleted_at IS NOT NULL AND dispatched_at IS NOT NULL LIMIT 1
"""
"""SQL: now, if there is something for `forget_deleted`; else NULL."""


async def forget_deleted(conn: AsyncConnection) -> int:
    """Delete some of those that their owners deleted, once webhooks were told of them; return how
    many. Of all orgs."""
    old = sa.select(batches.c.id).where(
        batches.c.deleted_at.is_not(None), batches.c.dispatched_at.is_not(None)
    )
    old = old.limit(FORGOTTEN_AT_ONCE).with_for_update(skip_locked=True)
    return (await conn.execute(sa.delete(batches).where(batches.c.id.in_(old)))).rowcount
