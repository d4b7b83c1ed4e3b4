"""Batches in Anthropic's shape: made of requests that were looked at as they came, cancelled,
deleted.

Above: `routes.message_batches`. Below: `batches`, whose rows they are. They are validated, run and
written as all batches are; what they were asked and have answered stands in files that nobody else
is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.batches.batches import Batch, add_batch, cancel_batch, get_batch
from gateway.batches.states import ENDED, MESSAGES
from gateway.batches.tables import batches
from gateway.files.files import drop_file
from gateway.tenancy.errors import InvalidField

PREFIX = "msgbatch_"
FIELD = "message_batch_id"


async def create_message_batch(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    key_id: str,
    input_file_id: str,
    num_requests: int,
    tags: Mapping[str, str] | None = None,
    actor: Actor,
) -> Batch:
    """Of a file with a request in each line. Raises: InvalidField."""
    return await add_batch(
        conn,
        org_id=org_id,
        project_id=project_id,
        key_id=key_id,
        endpoint=MESSAGES,
        input_file_id=input_file_id,
        field="requests",
        num_total=num_requests,
        tags=tags,
        prefix=PREFIX,
        actor=actor,
    )


async def cancel_message_batch(
    conn: AsyncConnection, *, org_id: str, project_id: str, batch_id: str, actor: Actor
) -> Batch:
    """Nothing more of it begins. Of one whose results are written nothing is left to cancel.
    Idempotent. Raises: NotFound, InvalidField (it has ended by itself)."""
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
    """With its results. Raises: NotFound, InvalidField (it has not ended)."""
    where = {"org_id": org_id, "project_id": project_id}
    found = await get_batch(conn, **where, batch_id=batch_id, lock=True, shape="anthropic")
    if found.status not in ENDED:
        raise InvalidField(FIELD, "a batch is deleted once it has ended; cancel it first")
    gone = sa.update(batches).where(batches.c.org_id == org_id, batches.c.id == batch_id)
    await conn.execute(gone.values(deleted_at=sa.func.now()))
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
