"""Cancels and deletes batches in Anthropic's shape. They are created, validated, run and written as
all batches are; what they were asked and have answered stands in files that nobody else is shown.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.batches.batches import cancel_batch, get_batch
from gateway.batches.tables import batches
from gateway.files.files import drop_file
from gateway.tenancy.errors import InvalidField
from gateway.wire.shared.batch import ENDED, Batch

FIELD = "message_batch_id"


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
        raise InvalidField(FIELD, "a batch that has ended cannot be canceled")
    return await cancel_batch(conn, **where, actor=actor, shape="anthropic")


async def delete_message_batch(
    conn: AsyncConnection, *, org_id: str, project_id: str, batch_id: str, actor: Actor
) -> None:
    """Delete a batch with its results. Raises: NotFound, InvalidField (it has not ended)."""
    where = {"org_id": org_id, "project_id": project_id}
    found = await get_batch(conn, **where, batch_id=batch_id, lock=True, shape="anthropic")
    if found.status not in ENDED:
        raise InvalidField(FIELD, "a batch is deleted once it has ended; cancel it first")
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
