"""A file that is being written: begun with all the room that it may take, finished with what it
took.

What is begun counts against its organization's room at once, with the most that it may become: two
uploads at a time do not share what is left. Nobody sees it before it is finished, and what never is
is swept.
"""

from __future__ import annotations

import unicodedata

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db import tenant
from gateway.files.contents import Contents, Writer
from gateway.files.files import COLUMNS, File
from gateway.files.sealing import NAMES
from gateway.files.tables import files
from gateway.ids import uuid7_hex
from gateway.secret import Cipher
from gateway.tenancy.errors import InvalidField, NotFound

PREFIX = "file-"
MAX_FILES_PER_ORG = 50_000
MAX_FILENAME_CHARS = 255
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 86_400
_HOLD_ROOM = sa.text("SELECT pg_advisory_xact_lock(hashtextextended('files of ' || :org_id, 0))")


class FileTooLarge(InvalidField):
    def __init__(self, most_bytes: int) -> None:
        super().__init__("file", f"must be at most {most_bytes} bytes")


class Upload:
    """Made by `begin_upload`. Who does not finish it gives it up."""

    def __init__(
        self,
        db: AsyncEngine,
        cipher: Cipher,
        writer: Writer,
        org_id: str,
        file_id: str,
        most_bytes: int,
    ) -> None:
        self._db, self._cipher, self._writer = db, cipher, writer
        self._most_bytes = most_bytes
        self.org_id, self.file_id = org_id, file_id
        self.size_bytes = 0

    async def write(self, data: bytes) -> None:
        """Raises: FileTooLarge."""
        self.size_bytes += len(data)
        if self.size_bytes > self._most_bytes:
            raise FileTooLarge(self._most_bytes)
        await self._writer.write(data)

    async def close(self) -> None:
        """Close the writing: all that was written is kept when this returns."""
        await self._writer.finish()

    async def finish(
        self,
        conn: AsyncConnection,
        *,
        purpose: str,
        filename: str,
        expires_after_s: int | None = None,
    ) -> File:
        """Finish the file after `close`: it is there.

        Raises: InvalidField; NotFound, where it took so long that it was swept.
        """
        expires_at = None
        if expires_after_s is not None:
            if not MIN_EXPIRY_S <= expires_after_s <= MAX_EXPIRY_S:
                between = f"must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
                raise InvalidField("expires_after.seconds", between)
            expires_at = sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, expires_after_s)
        named = {"org_id": self.org_id, "id": self.file_id, "filename": check_filename(filename)}
        begun = sa.and_(
            files.c.org_id == self.org_id,
            files.c.id == self.file_id,
            files.c.uploading_since.is_not(None),
            files.c.deleted_at.is_(None),
        )
        finished = sa.update(files).where(begun).returning(*COLUMNS)
        finished = finished.values(
            purpose=purpose,
            **NAMES.seal(self._cipher, named),
            size_bytes=self.size_bytes,
            uploading_since=None,
            created_at=sa.func.now(),
            expires_at=expires_at,
        )
        row = (await conn.execute(finished)).one_or_none()
        if row is None:
            raise NotFound("file", "the upload took too long")
        return File(**row._mapping)

    async def give_up(self) -> None:
        """Leave the upload; whatever was written of it is swept. Idempotent."""
        begun = sa.and_(files.c.org_id == self.org_id, files.c.id == self.file_id)
        begun = sa.and_(begun, files.c.uploading_since.is_not(None))
        async with tenant(self._db, self.org_id) as conn:
            await conn.execute(sa.update(files).where(begun).values(deleted_at=sa.func.now()))


async def begin_upload(
    db: AsyncEngine,
    contents: Contents,
    cipher: Cipher,
    *,
    org_id: str,
    project_id: str,
    most_bytes: int,
    org_bytes: int | None = None,
) -> Upload:
    """Begin a file of at most so many bytes. `org_bytes`: what an organization may have in all;
    None: no limit is checked.

    Raises: InvalidField.
    """
    if not project_id:
        raise InvalidField("file", "a key of the whole organization has no files")
    file_id = f"{PREFIX}{uuid7_hex()}"
    live = sa.and_(files.c.org_id == org_id, files.c.deleted_at.is_(None))
    used = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(files.c.size_bytes), 0))
    async with tenant(db, org_id) as conn:
        await conn.execute(_HOLD_ROOM, {"org_id": org_id})
        number, total = (await conn.execute(used.where(live))).one()
        if org_bytes is not None and number >= MAX_FILES_PER_ORG:
            raise InvalidField("file", f"an organization has at most {MAX_FILES_PER_ORG} files")
        if org_bytes is not None and total + most_bytes > org_bytes:
            most = f"an organization's files have at most {org_bytes} bytes in all"
            raise InvalidField("file", most)
        begun = sa.insert(files).values(
            id=file_id,
            org_id=org_id,
            project_id=project_id,
            purpose="",
            filename="",
            size_bytes=most_bytes,
            stored_in=contents.place,
            uploading_since=sa.func.now(),
        )
        await conn.execute(begun)
    return Upload(db, cipher, contents.writer(org_id, file_id), org_id, file_id, most_bytes)


def check_filename(filename: str) -> str:
    """Raises: InvalidField."""
    is_printable = all(unicodedata.category(each)[0] != "C" for each in filename)
    if not 1 <= len(filename) <= MAX_FILENAME_CHARS or not is_printable:
        most = f"must have 1 to {MAX_FILENAME_CHARS} printable characters"
        raise InvalidField("filename", most, detail=most)
    return filename
