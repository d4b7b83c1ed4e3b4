"""Does what a batch needs beside its lines: validates and finishes it. A gateway takes a batch by a
lease, which it renews while it works on it; who finds one whose lease ended begins that work anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.batches import results, validation
from gateway.batches.batches import COLUMNS
from gateway.batches.validation import InputBounds, validate
from gateway.files.store import FileStore
from gateway.secret import Cipher
from gateway.wire.shared.batch import Batch

Serves = Callable[[str], bool]

_HAS_LINES = "EXISTS (SELECT FROM batch_lines l WHERE l.batch_id = b.id AND l.state = 'open'{})"
_TAKE = sa.text(f"""
    UPDATE batches SET leased_by = :holder,
        leased_until = now() + make_interval(secs => :lease_s)
    WHERE id = (
        SELECT id FROM batches b
        WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
            AND (leased_until IS NULL OR leased_until <= now())
            AND CASE
                WHEN status IN ('validating', 'finalizing') THEN true
                WHEN status = 'cancelling' OR expires_at <= now()
                    THEN NOT {_HAS_LINES.format(" AND l.leased_until > now()")}
                ELSE NOT {_HAS_LINES.format("")}
            END
        ORDER BY id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
    )
    RETURNING {", ".join(column.name for column in COLUMNS)}
""")
WORK = "batches"
"""The topic of the trigger on batches."""
NEXT_DUE = """
    SELECT min(CASE
        WHEN status = 'in_progress' AND expires_at > now() THEN least(expires_at, coalesce(
            (SELECT now() FROM batch_lines l WHERE l.batch_id = b.id AND l.state = 'open'
                AND l.due_at <= now() AND (l.leased_until IS NULL OR l.leased_until <= now())
                LIMIT 1),
            (SELECT min(greatest(l.due_at, l.leased_until)) FROM batch_lines l
                WHERE l.batch_id = b.id AND l.state = 'open'),
            greatest(leased_until, now())))
        WHEN leased_until > now() THEN leased_until
        WHEN status IN ('validating', 'finalizing') THEN now()
        ELSE coalesce((SELECT max(l.leased_until) FROM batch_lines l WHERE l.batch_id = b.id
            AND l.state = 'open' AND l.leased_until > now()), now())
    END)
    FROM batches b WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
"""
"""SQL: the moment at which there is something to do next, for a batch or one of its lines, or
NULL."""
_RENEW = sa.text("""
    UPDATE batches SET leased_until = now() + make_interval(secs => :lease_s)
    WHERE id = ANY(CAST(:batch_ids AS text[])) AND leased_by = :holder
""")


async def take(db: AsyncEngine, holder: str, *, lease_s: float) -> Batch | None:
    """Take a batch of which something is to be done beside its lines."""
    async with db.begin() as conn:
        named = {"holder": holder, "lease_s": lease_s}
        row = (await conn.execute(_TAKE, named)).one_or_none()
    return None if row is None else Batch(**row._mapping)


async def renew(
    db: AsyncEngine, holder: str, batch_ids: Collection[str], *, lease_s: float
) -> None:
    named = {"holder": holder, "batch_ids": list(batch_ids), "lease_s": lease_s}
    async with db.begin() as conn:
        await conn.execute(_RENEW, named)


async def attend(
    db: AsyncEngine,
    cipher: Cipher,
    files: FileStore,
    batch: Batch,
    serves: Serves,
    bounds: InputBounds,
    holder: str,
    void: results.Void,
) -> None:
    """Do the one thing that is next. Raises what Postgres and the store of files raise; then
    somebody begins it anew."""
    try:
        if batch.status == "validating":
            await validate(db, cipher, files, batch, serves, bounds, holder)
        else:
            await results.finish(db, cipher, files, batch, holder, void)
    except (validation.ValidationTakenOver, results.FinishTakenOver):
        return
