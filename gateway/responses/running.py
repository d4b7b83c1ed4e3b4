"""Stores responses that run in the background: added, changed, cancelled, and given up if nobody
works on them any more. A row is changed by whoever runs it only while it says that it runs; so a
cancellation stands, and one that was given up stays so."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import tenant
from gateway.request_errors import BadField, TooManyInBackground
from gateway.responses.kept import ResponseOwner, StoredResponse
from gateway.responses.lost import LOST, LostResponse
from gateway.responses.store import CAN_BE_CONTINUED, KeptRows, alive, missing, opened, sealed
from gateway.responses.tables import owned
from gateway.responses.tables import responses as table
from gateway.secret import UnknownSecret
from gateway.wire.openai_responses.answer import ResponseError, ResponseObject, Status

log = logging.getLogger(__name__)

MAX_IN_BACKGROUND = 100
"""One org may have this many responses in the background at once."""
GIVEN_UP_AT_A_TIME = 100
RUNS = ("queued", "in_progress")


def next_lost(lost_after_s: float) -> str:
    """Return SQL: the moment from which a response counts as lost unless somebody works on it."""
    return f"""
        SELECT min(beat_at) + interval '{lost_after_s} seconds' FROM responses
        WHERE status IN {RUNS}
    """


Within = Callable[[AsyncConnection, bytes], Awaitable[None]]
"""Is given the transaction that adds a response, and its answer."""

Before = Callable[[AsyncConnection], Awaitable[None]]
NoteLost = Callable[[AsyncConnection, Sequence[LostResponse]], Awaitable[None]]
"""Is given the transaction that gives responses up, and those whose request is known."""

_response_decoder = msgspec.json.Decoder(ResponseObject)


class RunningRows(KeptRows):
    """The rows of one process."""

    async def add(
        self,
        owner: ResponseOwner,
        response: ResponseObject,
        kept: StoredResponse,
        *,
        within: Within | None = None,
    ) -> None:
        """Add a row. `within`: what stands or falls with it. Raises: TooManyInBackground, what that
        raises."""
        runs = sa.select(sa.func.count()).select_from(table)
        runs = runs.where(table.c.org_id == owner.org_id, table.c.status.in_(RUNS))
        row = {
            "id": response.id,
            "org_id": owner.org_id,
            "project_id": owner.project_id,
            "previous_id": response.previous_response_id,
            "status": response.status,
            "background": True,
            "beat_at": sa.func.now(),
            "expires_at": sa.func.now() + self._lifetime,
            **sealed(self._cipher, owner, response.id, kept),
        }
        async with tenant(self._db, owner.org_id) as conn:
            # One after the other, or two would both be the last one that fits.
            await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(lock_of(owner))))
            if (await conn.execute(runs)).scalar_one() >= MAX_IN_BACKGROUND:
                raise TooManyInBackground(MAX_IN_BACKGROUND)
            await conn.execute(insert(table).values(**row))
            if within is not None:
                await within(conn, kept.answer)

    async def change(
        self,
        owner: ResponseOwner,
        response: ResponseObject,
        kept: StoredResponse,
        *,
        before: Before | None = None,
    ) -> None:
        """Change a row that still runs. One that was answered is added to its conversation.
        `before`: what is written with it."""
        values = {"status": response.status, **sealed(self._cipher, owner, response.id, kept)}
        changed = sa.update(table).where(*owned(table, owner), table.c.id == response.id)
        changed = changed.where(table.c.status.in_(RUNS)).values(**values)
        async with tenant(self._db, owner.org_id) as conn:
            if before is not None:
                await before(conn)
            runs = (await conn.execute(changed)).rowcount == 1
            if runs and response.status in CAN_BE_CONTINUED and response.conversation is not None:
                added_to = response.conversation.id
                await self._conversations.append_if_there(conn, owner, added_to, kept.items)

    async def cancel(self, owner: ResponseOwner, response_id: str) -> bytes:
        """Cancel a response and return the answer as it stands then; one that has ended stays as it
        is. Raises: NotFound, BadField."""
        async with tenant(self._db, owner.org_id) as conn:
            found = sa.select(table).where(*alive(owner, response_id)).with_for_update()
            row = (await conn.execute(found)).one_or_none()
            if row is None:
                raise missing(response_id)
            if not row.background:
                message = "Cannot cancel a synchronous response."
                raise BadField(message, param="response_id")
            if row.status not in RUNS:
                return opened(self._cipher, row).answer
            return (await self._end(conn, row, "cancelled", None)).answer

    async def beat(self, response_ids: Sequence[str]) -> list[str]:
        """Note that responses are worked on; return those that need not be any more."""
        if not response_ids:
            return []
        mine = sa.update(table).where(table.c.id.in_(response_ids), table.c.status.in_(RUNS))
        async with self._system_db.begin() as conn:
            rows = await conn.execute(mine.values(beat_at=sa.func.now()).returning(table.c.id))
        still = set(rows.scalars())
        return [each for each in response_ids if each not in still]

    async def give_up(self, lost_after_s: float, note: NoteLost | None = None) -> int:
        """Fail responses that nobody has worked on for so long; return how many."""
        silent = sa.func.now() - timedelta(seconds=lost_after_s)
        found = sa.select(table).where(table.c.status.in_(RUNS), table.c.beat_at < silent)
        found = found.limit(GIVEN_UP_AT_A_TIME).with_for_update(skip_locked=True)
        async with self._system_db.begin() as conn:
            rows = (await conn.execute(found)).all()
            lost: list[LostResponse] = []
            for row in rows:
                try:
                    asked = opened(self._cipher, row).asked
                    await self._end(conn, row, "failed", LOST)
                    if asked is not None:
                        lost.append(LostResponse(ResponseOwner(row.org_id, row.project_id), asked))
                except UnknownSecret as error:
                    log.error("%s was sealed under the removed secret %s", row.id, error)
                    ended = sa.update(table).where(table.c.id == row.id).values(status="failed")
                    await conn.execute(ended)
            if note is not None and lost:
                await note(conn, lost)
        return len(rows)

    async def _end(
        self, conn: AsyncConnection, row: sa.Row[Any], status: Status, error: ResponseError | None
    ) -> StoredResponse:
        owner, kept = ResponseOwner(row.org_id, row.project_id), opened(self._cipher, row)
        response = _response_decoder.decode(kept.answer)
        ended = msgspec.structs.replace(response, status=status, error=error)
        changed = StoredResponse(kept.given, msgspec.json.encode(ended))
        values = {"status": status, **sealed(self._cipher, owner, row.id, changed)}
        await conn.execute(sa.update(table).where(table.c.id == row.id).values(**values))
        return changed


def lock_of(owner: ResponseOwner) -> sa.ColumnElement[int]:
    return sa.func.hashtextextended(f"background responses of {owner.org_id}", 0)
