"""Writes down what a batch has become: its output file, its error file, its end. What was not run
is ended first, so that nobody ends a line meanwhile; the files and the batch's last status are made
in one transaction, in which its lines go. What a crash cut off is written anew; the part that was
written is swept, as any unfinished upload."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.batches import COLUMNS
from gateway.batches.lines_out import ESCAPED, OVERHEAD_BYTES, EndedRow, to_line, to_message_line
from gateway.batches.sealing import ANSWERS, REQUESTS
from gateway.batches.states import (
    LineCode,
    at_the_end,
    code_of_unrun,
    is_over,
    shape_of,
    while_written,
)
from gateway.batches.tables import batch_lines, batches
from gateway.columns import UNREADABLE
from gateway.db import tenant
from gateway.files.files import BATCH_OUTPUT, MESSAGE_RESULTS
from gateway.files.store import FileStore
from gateway.files.uploads import Upload
from gateway.secret import Cipher
from gateway.wire.shared.batch import Batch

log = logging.getLogger(__name__)

READ_AT_ONCE = 20
DEFAULT_EXPIRY_S = 30 * 86_400
"""Results expire after this time unless the batch says otherwise."""
UNREADABLE_ANSWER = {"status": 500, "answer": b'{"error":{"message":"This answer is lost."}}'}
_OWN = batch_lines.c
_OPEN = _OWN.state == "open"
_SIZE = sa.func.octet_length(_OWN.answer) + ESCAPED * sa.func.octet_length(_OWN.custom_id)


Void = Callable[[str, str], Awaitable[object]]
"""Gives back what a request of an org had reserved."""


class Sizes(msgspec.Struct, frozen=True):
    """The most that each file may have, in bytes; 0: there is none."""

    output: int
    errors: int


async def finish(
    db: AsyncEngine, cipher: Cipher, files: FileStore, batch: Batch, holder: str, void: Void
) -> None:
    """Finish a batch, unless it goes on after all, or somebody else finishes it. `cipher`: for the
    purpose of batches. Raises what Postgres and the store of files raise."""
    async with tenant(db, batch.org_id) as conn:
        closed = await _close(conn, batch, holder, void)
        if closed is None:
            return
        sizes = await _sizes(conn, batch)
    output = await _begin(files, batch, sizes.output)
    errors = await _begin(files, batch, sizes.errors)
    try:
        async for line in _ended(db, cipher, batch):
            if shape_of(batch.endpoint) == "anthropic":
                upload, text = output, to_message_line(line)
            else:
                upload = output if line.is_output else errors
                text = to_line(batch.id, line)
            assert upload is not None
            await upload.write(text)
        for upload in (output, errors):
            if upload is not None:
                await upload.close()
        async with tenant(db, batch.org_id) as conn:
            await _end(conn, closed, holder, output, errors)
    except BaseException:
        for upload in (output, errors):
            if upload is not None:
                await upload.give_up()
        raise


async def _close(conn: AsyncConnection, batch: Batch, holder: str, void: Void) -> Batch | None:
    """Let nothing more of a batch run; None: it is not over, or not this holder's."""
    mine = _mine(batch, holder)
    is_late = (batches.c.expires_at <= sa.func.now()).label("is_late")
    locked = sa.select(*COLUMNS, is_late).where(mine).with_for_update(key_share=True)
    row = (await conn.execute(locked)).one_or_none()
    if row is None:
        return None
    found = Batch(**{name: row._mapping[name] for name in Batch.__struct_fields__})
    whose = sa.and_(_OWN.org_id == batch.org_id, _OWN.batch_id == batch.id, _OPEN)
    counted = sa.select(
        sa.func.count(),
        sa.func.count().filter(_OWN.leased_until > sa.func.now()),
    ).where(whose)
    num_open, num_leased = (await conn.execute(counted)).one()
    if not is_over(found.status, num_open=num_open, num_leased=num_leased, is_late=row.is_late):
        return None
    unrun = await _end_unrun(conn, whose, code_of_unrun(found.status))
    num_unrun = len(unrun)
    if num_unrun < num_open:
        raise FinishTakenOver
    for request_id in unrun:
        if request_id is not None:  # whoever began it is gone, and nobody runs it any more
            await void(batch.org_id, request_id)
    closed = sa.update(batches).where(mine).returning(*COLUMNS)
    closed = closed.values(
        status=while_written(found.status),
        num_failed=batches.c.num_failed + num_unrun,
        num_unrun=batches.c.num_unrun + num_unrun,
        finalizing_at=sa.func.coalesce(batches.c.finalizing_at, sa.func.now()),
    )
    return Batch(**(await conn.execute(closed)).one()._mapping)


async def _end_unrun(
    conn: AsyncConnection, whose: sa.ColumnElement[bool], code: LineCode
) -> Sequence[str | None]:
    """End what was not run, and return by which request each had been begun, if it was; those that
    somebody ends at this moment, late, are left to them."""
    free = sa.select(_OWN.number).where(whose).with_for_update(skip_locked=True)
    ended = sa.update(batch_lines).where(whose, _OWN.number.in_(free))
    ended = ended.values(state="failed", code=code, body=b"", leased_by=None)
    return (await conn.scalars(ended.returning(_OWN.request_id))).all()


async def _sizes(conn: AsyncConnection, batch: Batch) -> Sizes:
    has_one_file = shape_of(batch.endpoint) == "anthropic"
    is_output = sa.true() if has_one_file else _OWN.state == "done"
    each = sa.func.coalesce(_SIZE, ESCAPED * sa.func.octet_length(_OWN.custom_id)) + OVERHEAD_BYTES
    asked = sa.select(
        sa.func.coalesce(sa.func.sum(each).filter(is_output), 0),
        sa.func.coalesce(sa.func.sum(each).filter(~is_output), 0),
    ).where(_OWN.org_id == batch.org_id, _OWN.batch_id == batch.id)
    return Sizes(*(int(size) for size in (await conn.execute(asked)).one()))


async def _begin(files: FileStore, batch: Batch, most_bytes: int) -> Upload | None:
    if not most_bytes:
        return None
    return await files.begin_output(batch.org_id, batch.project_id, most_bytes=most_bytes)


async def _ended(db: AsyncEngine, cipher: Cipher, batch: Batch) -> AsyncIterator[EndedRow]:
    """Yield the lines in the order of the input."""
    listed = sa.select(batch_lines).order_by(_OWN.number).limit(READ_AT_ONCE)
    listed = listed.where(_OWN.org_id == batch.org_id, _OWN.batch_id == batch.id)
    last = 0
    while True:
        async with tenant(db, batch.org_id) as conn:
            rows = (await conn.execute(listed.where(_OWN.number > last))).all()
        if not rows:
            return
        last = rows[-1].number
        for row in rows:
            yield _open(cipher, dict(row._mapping))


def _open(cipher: Cipher, row: dict[str, Any]) -> EndedRow:
    """Open a line; what cannot be read any more is said so, and keeps no other from its owner."""
    for found, lost in ((REQUESTS, {"custom_id": ""}), (ANSWERS, UNREADABLE_ANSWER)):
        try:
            row |= found.open(cipher, row)
        except UNREADABLE as error:
            log.error("line %s of %s does not open: %r", row["number"], row["batch_id"], error)
            row |= lost
    return EndedRow(**{name: row[name] for name in EndedRow.__struct_fields__})


async def _end(
    conn: AsyncConnection, batch: Batch, holder: str, output: Upload | None, errors: Upload | None
) -> None:
    unrun = sa.select(sa.func.count()).where(
        _OWN.org_id == batch.org_id, _OWN.batch_id == batch.id, _OWN.code.is_not(None)
    )
    status = at_the_end(batch.status, num_unrun=await conn.scalar(unrun) or 0)
    ended = sa.update(batches).where(_mine(batch, holder)).returning(batches.c.id)
    values: dict[str, Any] = {
        "status": status,
        f"{status}_at": sa.func.now(),
        "leased_by": None,
        "leased_until": None,
    }
    for name, upload in (("output", output), ("error", errors)):
        if upload is not None:
            await _finish_file(conn, batch, upload, f"{batch.id}_{name}.jsonl")
            values[f"{name}_file_id"] = upload.file_id
    if await conn.scalar(ended.values(**values)) is None:
        raise FinishTakenOver
    gone = sa.delete(batch_lines)
    await conn.execute(gone.where(_OWN.org_id == batch.org_id, _OWN.batch_id == batch.id))


class FinishTakenOver(Exception):
    """Somebody else finishes the batch, or still ends a line of it: what was written here is given
    up."""


async def _finish_file(conn: AsyncConnection, batch: Batch, upload: Upload, name: str) -> None:
    await upload.finish(
        conn,
        purpose=MESSAGE_RESULTS if shape_of(batch.endpoint) == "anthropic" else BATCH_OUTPUT,
        filename=name,
        expires_after_s=batch.output_expires_after_s or DEFAULT_EXPIRY_S,
    )


def _mine(batch: Batch, holder: str) -> sa.ColumnElement[bool]:
    own = batches.c
    return sa.and_(own.org_id == batch.org_id, own.id == batch.id, own.leased_by == holder)
