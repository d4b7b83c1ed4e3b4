"""Files as rows: shown to their project, deleted, and swept with their content once they ended.

Knows no content.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.files.tables import files
from gateway.tenancy.errors import NotFound
from gateway.tenancy.projects import keeps_nothing

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data"]
"""A purpose with which a client may upload a file."""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
BATCH: Purpose = "batch"
BATCH_OUTPUT = "batch_output"
"""The purpose of the files that a batch writes."""
MESSAGE_BATCH, MESSAGE_RESULTS = "message_batch", "message_batch_results"
"""The purposes of the requests and the results of a batch in Anthropic's shape: only that batch
shows these files."""
_INNER = (MESSAGE_BATCH, MESSAGE_RESULTS)
STALE_UPLOAD_S = 6 * 3600
"""An upload that has not ended by then has no gateway any more."""
SWEEP_BATCH = 100


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    project_id: str
    purpose: str
    filename: str
    """Sealed in its row (`FileStore.opened`)."""
    secret_id: str | None
    size_bytes: int
    stored_in: str
    """The place of its content."""
    created_at: datetime
    expires_at: datetime | None


class ExpiredFile(msgspec.Struct, frozen=True):
    org_id: str
    file_id: str


COLUMNS = [files.c[name] for name in File.__struct_fields__]
_IS_THERE = sa.and_(
    files.c.uploading_since.is_(None),
    files.c.deleted_at.is_(None),
    sa.or_(files.c.expires_at.is_(None), files.c.expires_at > sa.func.now()),
)


def select_files(
    org_id: str, project_id: str, *, purpose: str | None = None, is_inner: bool = False
) -> sa.Select[Any]:
    """Select the files of a project, for a page of them; None: for whatever they are.

    `is_inner`: those that nobody is shown as files.
    """
    own = sa.and_(files.c.org_id == org_id, files.c.project_id == project_id, _IS_THERE)
    listed = sa.select(*COLUMNS).where(own, files.c.purpose.in_(_INNER) == is_inner)
    return listed if purpose is None else listed.where(files.c.purpose == purpose)


def to_files(rows: Iterable[sa.Row[Any]]) -> list[File]:
    return [File(**row._mapping) for row in rows]


async def get_file(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    file_id: str,
    field: str = "file_id",
    is_inner: bool = False,
) -> File:
    """Return a file; `field`: what names it. Raises: NotFound."""
    found = select_files(org_id, project_id, is_inner=is_inner).where(files.c.id == file_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound(field, f"no file {file_id!r}")
    return File(**row._mapping)


async def delete_file(
    conn: AsyncConnection, *, org_id: str, project_id: str, file_id: str, actor: Actor
) -> None:
    """Delete a file: it is gone for everybody; its content is swept. Raises: NotFound."""
    mine = sa.and_(
        files.c.org_id == org_id, files.c.project_id == project_id, files.c.id == file_id
    )
    gone = sa.update(files).where(mine, _IS_THERE, files.c.purpose.not_in(_INNER))
    gone = gone.values(deleted_at=sa.func.now())
    row = (await conn.execute(gone.returning(*COLUMNS))).one_or_none()
    if row is None:
        raise NotFound("file_id", f"no file {file_id!r}")
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="file.deleted",
        target=file_id,
        before={"project_id": project_id, "purpose": row.purpose, "bytes": row.size_bytes},
        project_id=project_id,
    )


async def drop_file(conn: AsyncConnection, *, org_id: str, project_id: str, file_id: str) -> None:
    """One that nobody was shown as a file. Idempotent."""
    mine = sa.and_(
        files.c.org_id == org_id, files.c.project_id == project_id, files.c.id == file_id
    )
    gone = sa.update(files).where(mine, files.c.purpose.in_(_INNER), files.c.deleted_at.is_(None))
    await conn.execute(gone.values(deleted_at=sa.func.now()))


# ---- for whoever sweeps: of all orgs

_END = sa.text(f"""
    UPDATE files SET deleted_at = coalesce(deleted_at, now()) WHERE id IN (
        SELECT id FROM files
        WHERE stored_in = :place AND id > :after AND (deleted_at IS NOT NULL OR expires_at <= now()
            OR uploading_since < now() - interval '{STALE_UPLOAD_S} seconds')
        ORDER BY id LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
    RETURNING org_id, id
""")
_FORGET = sa.text("DELETE FROM files WHERE id = :file_id AND deleted_at IS NOT NULL")


async def end_files_of_projects(conn: AsyncConnection) -> None:
    """End all files of projects that are archived or are to keep nothing."""
    gone = sa.update(files).where(
        keeps_nothing(files.c.org_id, files.c.project_id),
        files.c.deleted_at.is_(None),
        files.c.uploading_since.is_(None),
    )
    await conn.execute(gone.values(deleted_at=sa.func.now()))


async def end_files(conn: AsyncConnection, place: str, *, after: str = "") -> list[ExpiredFile]:
    """End some files of that place that are nobody's any more, and that nobody can finish from now
    on, in the order of their ids, behind `after`."""
    found = await conn.execute(_END, {"place": place, "after": after})
    ended = (ExpiredFile(row.org_id, row.id) for row in found)
    return sorted(ended, key=lambda each: each.file_id)


async def forget_file(conn: AsyncConnection, ended: ExpiredFile) -> None:
    """Delete the row of a file, after its content."""
    await conn.execute(_FORGET, {"file_id": ended.file_id})
