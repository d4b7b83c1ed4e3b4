"""Stores the texts of requests of projects that want it, beside the rows of the request log: packed
and sealed, written behind everybody's back, and deleted in time.

The thread of the access log packs them; a task writes them, as it does rows. What waits for a
Postgres that is away is bounded in bytes, and what comes beyond that is dropped and counted
(`tollgate_request_rows_dropped`). A row is bound to its request and project. Texts of a project
that stores none any more, or is archived, are deleted within minutes; reading finds them no more at
once.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.columns import Row, SealedColumns
from gateway.request_log.content import RequestContent, decode, encode, to_content
from gateway.request_log.rows import RequestRow
from gateway.request_log.tables import request_content as table
from gateway.request_log.writer import DAY_MS, FLUSH_INTERVAL_S, DailyLog
from gateway.secret import Cipher, Secret
from gateway.telemetry.captured_content import CapturedContent
from gateway.tenancy.projects import stores_content

log = logging.getLogger(__name__)

PURPOSE = "request content"
"""`Secret` derives a key for it."""
PACKING_LEVEL = 1
"""zlib's fastest: three to five times smaller."""
MAX_UNPACKED_BYTES = 8 * 1024 * 1024
"""Many times what is stored of one request."""
MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Packed, in one worker, beside a batch that is on its way."""
TIDY_INTERVAL_S = 300.0
MAX_DELETED = 500
"""Rows a statement."""
MAX_PROJECTS = 100
"""Projects of which texts are deleted at a time."""


def _context(row: Row) -> bytes:
    return "\n".join(("request_content", row["org"], row["project"], row["id"].hex)).encode()


CONTENT = SealedColumns(
    table=table,
    columns=("content",),
    place=("org", "project", "id"),
    purpose=PURPOSE,
    context=_context,
)


class ContentRow(msgspec.Struct, frozen=True, gc=False):
    """The sealed texts of one request."""

    org: str
    project: str
    at: datetime
    id: UUID
    content: bytes
    secret_id: str

    def __len__(self) -> int:
        return len(self.content)


def pack(content: RequestContent) -> bytes:
    return zlib.compress(encode(content), PACKING_LEVEL)


def unpack(packed: bytes) -> RequestContent:
    """Raises: ValueError."""
    unpacking = zlib.decompressobj()
    plain = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
    if not unpacking.eof:
        raise ValueError("longer than any content")
    return decode(plain)


_COLUMNS = {
    "org": "text",
    "project": "text",
    "at": "timestamptz",
    "id": "uuid",
    "content": "bytea",
    "secret_id": "text",
}
_ROWS = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in _COLUMNS.items())
_INSERT = sa.text(f"""
    INSERT INTO request_content ({", ".join(_COLUMNS)})
    SELECT * FROM unnest({_ROWS})
    ON CONFLICT DO NOTHING
""")
_KEEP_DAY = sa.text("SELECT keep_content_day(:day)")
_DROP_DAYS = sa.text("SELECT drop_content_days(:before)")
_PROJECTS = sa.text("""
    WITH RECURSIVE found AS (
        (SELECT org, project FROM request_content ORDER BY org, project LIMIT 1)
        UNION ALL
        SELECT next.org, next.project FROM found, LATERAL (
            SELECT org, project FROM request_content
            WHERE (org, project) > (found.org, found.project) ORDER BY org, project LIMIT 1
        ) AS next
    )
    SELECT org, project FROM found
""")
"""Each project that has texts, by one look into an index."""


class ContentLog(DailyLog[ContentRow]):
    """The texts of one worker that are on their way. `keep_days`: 0: none are kept, whatever
    projects say."""

    noted = "contents of requests"
    tidy_interval_s = TIDY_INTERVAL_S

    def __init__(
        self,
        db: AsyncEngine,
        secret: Secret,
        *,
        keep_days: int,
        on_dropped: Callable[[int], object],
        interval_s: float = FLUSH_INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            db,
            keep_days=keep_days,
            on_dropped=on_dropped,
            interval_s=interval_s,
            wall_clock=wall_clock,
        )
        self.cipher = Cipher(secret, PURPOSE)
        """Opens what is stored."""
        self._putting = threading.Lock()
        self._bytes_put = 0  # counted by who puts
        self._bytes_taken = 0  # by who writes

    @property
    def keep_days(self) -> int:
        return self._keep_days

    @property
    def keeps_any(self) -> bool:
        return self._keep_days > 0

    def put(self, request: RequestRow, captured: CapturedContent) -> None:
        """Leave the texts of a request to be written. In a thread of its own, as it packs and
        seals; several may at once. Never raises: what cannot be read is lost, and counted."""
        if not self.keeps_any:
            return
        row: ContentRow | None = None
        try:
            content = to_content(captured)
            if content is None:
                return
            row = self._sealed(request, content)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            log.warning("content of %s is not stored: %s", request.id, type(error).__name__)
        with self._putting:
            if row is None:
                self._refuse()
            else:
                self._put(request.at_ms // DAY_MS, row)

    def _sealed(self, request: RequestRow, content: RequestContent) -> ContentRow:
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=request.at_ms)
        org, project, id_ = request.org, request.project, UUID(request.id)
        values = {"org": org, "project": project, "id": id_, "content": pack(content)}
        sealed = CONTENT.seal(self.cipher, values)
        return ContentRow(org, project, at, id_, sealed["content"], sealed["secret_id"])

    def _put(self, day: int, row: ContentRow) -> None:
        num_refused = self._num_refused
        super()._put(day, row)
        if self._num_refused == num_refused:
            self._bytes_put += len(row)

    def _has_room(self, row: ContentRow) -> bool:
        num_bytes = self._bytes_put - self._bytes_taken + len(row)
        return super()._has_room(row) and num_bytes <= MAX_WAITING_BYTES

    def _take(self) -> list[tuple[int, ContentRow]]:
        batch = super()._take()
        self._bytes_taken += sum(len(row) for _, row in batch)
        return batch

    def _take_back(self, batch: Sequence[tuple[int, ContentRow]]) -> None:
        super()._take_back(batch)
        self._bytes_taken -= sum(len(row) for _, row in batch)

    async def _insert(self, conn: AsyncConnection, batch: Sequence[ContentRow]) -> None:
        values = {name: [getattr(row, name) for row in batch] for name in _COLUMNS}
        await conn.execute(_INSERT, values)

    async def _keep_day(self, conn: AsyncConnection, day: date) -> None:
        await conn.execute(_KEEP_DAY, {"day": day})

    async def _drop_days(self, conn: AsyncConnection, *, keep: int, today: date) -> int:
        before = today - timedelta(days=keep)
        return int(await conn.scalar(_DROP_DAYS, {"before": before}) or 0)

    async def _forget(self) -> None:
        """Delete texts of projects that store none now, as many as the time allows."""
        num_deleted = 1
        while num_deleted:
            async with self._db.begin() as conn:
                num_deleted = await delete_unwanted(conn)


async def delete_unwanted(conn: AsyncConnection) -> int:
    """Delete some texts of projects that store none now; return how many. `conn`: sees the rows of
    all organizations."""
    known = _PROJECTS.columns(sa.column("org", sa.Text), sa.column("project", sa.Text))
    found = known.subquery("found")
    unwanted = sa.select(found.c.org, found.c.project).where(
        sa.not_(stores_content(found.c.org, found.c.project))
    )
    num_deleted = 0
    for org, project in (await conn.execute(unwanted.limit(MAX_PROJECTS))).all():
        of_it = sa.and_(table.c.org == org, table.c.project == project)
        some = sa.select(table.c.org, table.c.at, table.c.id).where(of_it).limit(MAX_DELETED)
        key = sa.tuple_(table.c.org, table.c.at, table.c.id)
        num_deleted += (await conn.execute(sa.delete(table).where(key.in_(some)))).rowcount
    return num_deleted
