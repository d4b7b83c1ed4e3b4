"""Objects without a file, and files without their objects: looked for once a day.

Rows go after what they stand for, so an object has no row only where a gateway died between the
two, or a database was restored; it is deleted when it is a day old and was sealed by this
installation: one that shares its bucket and prefix with another, by mistake, takes nothing of that.
A file whose content is gone is told in the log, and stays: whoever reads it is told so.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.files.errors import FilesError
from gateway.files.s3_contents import PLACE, Place, S3Contents
from gateway.files.tables import files

log = logging.getLogger(__name__)

STRAY_AGE_S = 24 * 3600.0
"""Longer than any upload may take."""
INTERVAL_S = 24 * 3600.0
MAX_TOLD = 100
"""Files whose content is looked for, each by itself, in one pass."""
OFTEN = random.Random()


class SweepResult(msgspec.Struct, frozen=True):
    num_deleted: int
    lost: list[str]
    """Ids of files."""


class Strays(Flusher):
    """One per process. `system_db` sees all. Gateways look at their own times."""

    def __init__(self, system_db: AsyncEngine, contents: S3Contents) -> None:
        super().__init__("look for strays", INTERVAL_S * OFTEN.uniform(0.5, 1.0))
        self._system_db, self._contents = system_db, contents

    async def flush(self) -> None:
        try:
            found = await self.look()
        except (*DATABASE_ERRORS, FilesError) as error:
            log.warning("strays are looked for later (%s)", type(error).__name__)
            return
        if found.num_deleted:
            log.warning("%d objects of no file were deleted", found.num_deleted)
        for file_id in found.lost:
            log.error("the content of %s is not in the store", file_id)

    async def look(self, *, stray_age_s: float = STRAY_AGE_S) -> SweepResult:
        """Raises: DATABASE_ERRORS, FileStoreAway."""
        num_deleted, lost, last = 0, list[str](), ("", "")
        async for there in self._contents.listed(older_than_s=stray_age_s):
            if not there:
                continue
            num_deleted += await self._delete_strays(there)
            lost += await self._missing(last, max(there), there, stray_age_s)
            last = max(last, *there)
        lost += await self._missing(last, None, (), stray_age_s)
        return SweepResult(num_deleted, lost)

    async def _delete_strays(self, there: Collection[Place]) -> int:
        known = sa.select(files.c.id).where(files.c.id.in_([file_id for _, file_id in there]))
        async with self._system_db.connect() as conn:
            ids = set(await conn.scalars(known))
        num_deleted = 0
        for org_id, file_id in there:
            if file_id not in ids and await self._contents.is_ours(org_id, file_id):
                await self._contents.delete(org_id, file_id)
                num_deleted += 1
        return num_deleted

    async def _missing(
        self, after: Place, until: Place | None, there: Collection[Place], age_s: float
    ) -> list[str]:
        """Return the files between two places whose content is not there. Stores list in the order
        of bytes; of one that does not, each is looked at by itself."""
        old = sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, age_s)
        place = sa.tuple_(files.c.org_id.collate("C"), files.c.id.collate("C"))
        meant = sa.select(files.c.org_id, files.c.id).where(
            files.c.stored_in == PLACE,
            files.c.uploading_since.is_(None),
            files.c.deleted_at.is_(None),
            files.c.created_at < old,
            place > after,
            files.c.id.not_in([file_id for _, file_id in there]),
        )
        if until is not None:
            meant = meant.where(place <= until)
        async with self._system_db.connect() as conn:
            missing = (await conn.execute(meant.order_by(place).limit(MAX_TOLD))).all()
        return [row.id for row in missing if not await self._contents.has(row.org_id, row.id)]
