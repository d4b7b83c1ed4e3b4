"""Validates a batch: its input becomes its lines, all of them or none. The lines and the batch's
next status are one transaction, so one that a crash cut off is validated anew from its beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.lines_in import (
    Line,
    LineError,
    LinesReader,
    RequestsReader,
    TooLong,
    split,
)
from gateway.batches.sealing import ERRORS, REQUESTS
from gateway.batches.states import after_validation, shape_of
from gateway.batches.tables import batch_lines, batches
from gateway.db import tenant
from gateway.files.errors import ContentLost
from gateway.files.files import File, drop_file, get_file
from gateway.files.store import FileStore
from gateway.secret import Cipher, UnknownSecret
from gateway.tenancy.errors import NotFound
from gateway.wire.shared.batch import Batch

log = logging.getLogger(__name__)

INSERTED_AT_ONCE = 200
AnyReader = LinesReader | RequestsReader


class InputBounds(msgspec.Struct, frozen=True, kw_only=True):
    max_lines: int
    max_file_bytes: int
    max_line_bytes: int


class ValidationTakenOver(Exception):
    """Somebody else validates the batch, or has."""


class _Invalid(Exception):
    """The input is invalid: rolls back the lines that were good."""


async def validate(
    db: AsyncEngine,
    cipher: Cipher,
    files: FileStore,
    batch: Batch,
    serves: Callable[[str], bool],
    bounds: InputBounds,
    holder: str,
) -> None:
    """Validate a batch. `serves`: whether a model may be asked. Raises: TakenOver, and what
    Postgres and the store of files raise."""
    reader: AnyReader = RequestsReader()
    if shape_of(batch.endpoint) == "openai":
        reader = LinesReader(batch.endpoint, serves, max_lines=bounds.max_lines)
    try:
        async with tenant(db, batch.org_id) as conn:
            await _read(conn, cipher, files, batch, reader, bounds)
            if reader.errors:
                raise _Invalid
            await _step(conn, cipher, batch, holder, reader)
    except _Invalid:
        async with tenant(db, batch.org_id) as conn:
            await _step(conn, cipher, batch, holder, reader)


async def _read(
    conn: AsyncConnection,
    cipher: Cipher,
    files: FileStore,
    batch: Batch,
    reader: AnyReader,
    bounds: InputBounds,
) -> None:
    try:
        file = await get_file(
            conn,
            org_id=batch.org_id,
            project_id=batch.project_id,
            file_id=batch.input_file_id,
            is_inner=shape_of(batch.endpoint) == "anthropic",
        )
    except NotFound:
        message = "The input file is gone."
        reader.errors.append(LineError(code="file_not_found", message=message))
        return
    if file.size_bytes > bounds.max_file_bytes:
        message = f"The input file is larger than {bounds.max_file_bytes} bytes."
        reader.errors.append(LineError(code="file_too_large", message=message))
        return
    await _insert_all(conn, cipher, files, batch, file, reader, bounds)
    reader.end()


async def _insert_all(
    conn: AsyncConnection,
    cipher: Cipher,
    files: FileStore,
    batch: Batch,
    file: File,
    reader: AnyReader,
    bounds: InputBounds,
) -> None:
    found: list[Line] = []
    size_bytes = 0
    try:
        async for number, text in split(files.read(file), max_line_bytes=bounds.max_line_bytes):
            line = reader.read(number, text)
            if reader.has_given_up:
                return
            if line is not None and not reader.errors:
                found.append(line)
                size_bytes += len(line.body)
            if len(found) == INSERTED_AT_ONCE or size_bytes > bounds.max_line_bytes:
                await _insert(conn, cipher, batch, found)
                found, size_bytes = [], 0
        await _insert(conn, cipher, batch, found)
    except TooLong as error:
        reader.refuse_long(error.number, bounds.max_line_bytes)
    except (ContentLost, UnknownSecret) as error:
        log.error("the input of %s cannot be read: %s", batch.id, error)
        message = "The content of the input file is lost."
        reader.errors.append(LineError(code="file_lost", message=message))


async def _insert(
    conn: AsyncConnection, cipher: Cipher, batch: Batch, lines: Sequence[Line]
) -> None:
    rows = [
        {
            "batch_id": batch.id,
            "number": line.number,
            "org_id": batch.org_id,
            "custom_id": line.custom_id,
            "body": line.body,
        }
        for line in lines
    ]
    if rows:
        sealed = [{**row, **REQUESTS.seal(cipher, row)} for row in rows]
        await conn.execute(sa.insert(batch_lines), sealed)


async def _step(
    conn: AsyncConnection, cipher: Cipher, batch: Batch, holder: str, reader: AnyReader
) -> None:
    """Bring a batch to its next status, unless somebody else has taken it over."""
    mine = sa.and_(
        batches.c.org_id == batch.org_id,
        batches.c.id == batch.id,
        batches.c.leased_by == holder,
        batches.c.in_progress_at.is_(None),
        batches.c.status.in_(("validating", "cancelling")),
    )
    locked = sa.select(batches.c.status).where(mine).with_for_update(key_share=True)
    status = await conn.scalar(locked)
    if status is None:
        raise ValidationTakenOver
    following = after_validation(status, is_valid=not reader.errors)
    moment = "failed_at" if following == "failed" else "in_progress_at"
    values: dict[str, Any] = {"status": following, moment: sa.func.now()}
    values |= {"leased_by": None, "leased_until": None}
    if reader.errors:
        errors = [msgspec.to_builtins(each) for each in reader.errors]
        row = {"org_id": batch.org_id, "project_id": batch.project_id, "id": batch.id}
        values |= ERRORS.seal(cipher, {**row, "errors": errors})
    else:
        values |= {"num_total": reader.num_lines, "model": reader.model}
    await conn.execute(sa.update(batches).where(mine).values(**values))
    if shape_of(batch.endpoint) == "anthropic":  # a file that nobody sees, and now nobody needs
        await drop_file(
            conn,
            org_id=batch.org_id,
            project_id=batch.project_id,
            file_id=batch.input_file_id,
        )
