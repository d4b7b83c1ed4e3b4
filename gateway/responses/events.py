"""Keeps the events of responses that run in the background while they come, and lets any worker
follow them from any event on. Whoever runs a response gathers what it streams in an `EventLog` and
writes some at a time, sealed; the last ones in the transaction that ends it, so whoever sees that
it has ended sees them all. Of each the newest `MAX_BYTES` are kept, for `store.EVENTS_LIFETIME_S`.
One that was cancelled, or whose worker died, has no last event of its own: who follows it is told
by its row."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from foundation import sse
from gateway.db import tenant
from gateway.request_errors import BadField
from gateway.responses.kept import ResponseOwner, StoredResponse
from gateway.responses.running import RUNS
from gateway.responses.store import KeptRows, alive, missing, opened
from gateway.responses.tables import response_events as table
from gateway.responses.tables import responses
from gateway.wire.openai_responses.answer import ResponseObject
from gateway.wire.openai_responses.events import StatusEvent, StatusType

MAX_BYTES = 16 * 1024 * 1024
"""The events that are kept of one response have at most this size; older ones are dropped."""
POLL_S = 0.25
READ_AT_ONCE = 20
"""Rows."""
END = b"\n\n"
LAST = tuple(f"event: response.{name}\n".encode() for name in ("completed", "incomplete", "failed"))
ENDINGS: dict[str, StatusType] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
}
"""All else has failed; a response that was cancelled says so itself."""
_response_decoder = msgspec.json.Decoder(ResponseObject)


class EventChunk(msgspec.Struct, frozen=True):
    """Events of a response, one after the other, as they were framed."""

    owner: ResponseOwner
    response_id: str
    first: int
    content: bytes

    @property
    def last(self) -> int:
        return self.first + self.content.count(END) - 1


class EventLog:
    """The events of one response, by whoever runs it: what was not written yet, and how much
    was."""

    def __init__(self, owner: ResponseOwner, response_id: str) -> None:
        self.owner, self.response_id = owner, response_id
        self._pending: list[bytes] = []
        self._next = 0
        self._written: deque[tuple[int, int]] = deque()
        """Last number and bytes."""

    def add(self, content: bytes) -> None:
        """Add whole events."""
        if content:
            self._pending.append(content)

    def take(self) -> EventChunk | None:
        """Take what is to be written; None: nothing. If writing fails, `put_back`."""
        if not self._pending:
            return None
        found = EventChunk(self.owner, self.response_id, self._next, b"".join(self._pending))
        self._pending.clear()
        self._next = found.last + 1
        return found

    def put_back(self, some: EventChunk) -> None:
        """Put back what was not written; what does not fit any more is dropped with its numbers."""
        content, at = some.content, 0
        while len(content) - at > MAX_BYTES:
            at = content.index(END, at) + len(END)
        content = content[at:]
        self._next = some.last + 1 - content.count(END)
        self._pending.insert(0, content)

    def has_written(self, some: EventChunk) -> int | None:
        """Return the last number of those that are to be dropped for it; None: all fit."""
        self._written.append((some.last, len(some.content)))
        dropped = None
        while len(self._written) > 1 and sum(size for _, size in self._written) > MAX_BYTES:
            dropped, _ = self._written.popleft()
        return dropped


_ADD = sa.text("""
    INSERT INTO response_events
        (response_id, org_id, first_number, last_number, content, secret_id)
    SELECT id, org_id, :first, :last, :content, :secret_id FROM responses
    WHERE id = :response_id AND org_id = :org_id AND status IN ('queued', 'in_progress')
    ON CONFLICT (response_id, first_number) DO UPDATE
        SET last_number = EXCLUDED.last_number, content = EXCLUDED.content,
            secret_id = EXCLUDED.secret_id
        WHERE EXCLUDED.last_number > response_events.last_number
""")


class EventRows(KeptRows):
    """The event rows of one process."""

    async def write(self, logs: Sequence[EventLog]) -> None:
        """Write what logs have gathered, of those that still run. Raises: DATABASE_ERRORS; then
        nothing was."""
        taken = [(log, some) for log in logs if (some := log.take()) is not None]
        if not taken:
            return
        try:
            async with self._system_db.begin() as conn:
                for _, some in taken:
                    await self.add(conn, some)
        except BaseException:
            for log, some in taken:
                log.put_back(some)
            raise
        for log, some in taken:
            dropped = log.has_written(some)
            if dropped is not None:
                await self._drop(log, dropped)

    async def add(self, conn: AsyncConnection, some: EventChunk) -> None:
        """Add events in the transaction of whoever writes the response's row, before that says that
        it has ended."""
        context = some.owner.context(some.response_id, "events", str(some.first))
        sealed = self._cipher.seal(some.content, context)
        row = {
            "response_id": some.response_id,
            "org_id": some.owner.org_id,
            "first": some.first,
            "last": some.last,
            "content": sealed.data,
            "secret_id": sealed.secret_id,
        }
        await conn.execute(_ADD, row)

    async def follow(
        self, owner: ResponseOwner, response_id: str, after: int, is_over: asyncio.Event
    ) -> AsyncIterator[bytes]:
        """Yield events after a number as they come, until the response has ended or `is_over`. The
        first is empty: the response can be followed. Raises: NotFound, BadField."""
        await self._check(owner, response_id, after)
        yield b""
        while True:
            row, rows = await self._read(owner, response_id, after)
            if row is None:  # deleted meanwhile
                return
            for each in rows:
                content = self._opened(owner, each)
                skipped = max(0, after + 1 - each.first_number)
                yield after_events(content, skipped)
                after = each.last_number
            if not rows and row.status not in RUNS:
                yield await self._end(owner, row, after)
                return
            if is_over.is_set():
                return
            if not rows:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await is_over.wait()

    async def _check(self, owner: ResponseOwner, response_id: str, after: int) -> None:
        mine = sa.select(responses.c.background)
        oldest = sa.select(sa.func.min(table.c.first_number)).where(*of_it(owner, response_id))
        async with tenant(self._db, owner.org_id) as conn:
            row = (await conn.execute(mine.where(*alive(owner, response_id)))).one_or_none()
            first = await conn.scalar(oldest)
        if row is None:
            raise missing(response_id)
        if not row.background:
            raise BadField(
                "Only a response that was created with 'background' can be streamed again.",
                param="stream",
            )
        if first is not None and after + 1 < first:
            raise BadField(
                f"The events of this response are kept from number {first} on.",
                param="starting_after",
            )

    async def _read(
        self, owner: ResponseOwner, response_id: str, after: int
    ) -> tuple[sa.Row[Any] | None, Sequence[sa.Row[Any]]]:
        """Return the response as it was before its events were read, and the events."""
        following = sa.select(table).where(*of_it(owner, response_id), table.c.last_number > after)
        following = following.order_by(table.c.first_number).limit(READ_AT_ONCE)
        async with tenant(self._db, owner.org_id) as conn:
            found = sa.select(responses).where(*alive(owner, response_id))
            row = (await conn.execute(found)).one_or_none()
            return row, (await conn.execute(following)).all()

    async def _end(self, owner: ResponseOwner, row: sa.Row[Any], after: int) -> bytes:
        """Return what the row says if no event does: all that is left once its events are swept."""
        newest = sa.select(table).where(*of_it(owner, row.id))
        async with tenant(self._db, owner.org_id) as conn:
            newest = newest.order_by(table.c.first_number.desc()).limit(1)
            last = (await conn.execute(newest)).one_or_none()
        number = after + 1
        if last is not None:
            if self._opened(owner, last).split(END)[-2].startswith(LAST):
                return b""
            number = last.last_number + 1
        return b"" if number <= after else ended(opened(self._cipher, row), number)

    async def _drop(self, log: EventLog, last: int) -> None:
        old = sa.delete(table).where(*of_it(log.owner, log.response_id))
        async with self._system_db.begin() as conn:
            await conn.execute(old.where(table.c.last_number <= last))

    def _opened(self, owner: ResponseOwner, row: sa.Row[Any]) -> bytes:
        context = owner.context(row.response_id, "events", str(row.first_number))
        return self._cipher.open(row.content, context, row.secret_id)


def of_it(owner: ResponseOwner, response_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (table.c.org_id == owner.org_id, table.c.response_id == response_id)


def after_events(content: bytes, number: int) -> bytes:
    """Return what stands after so many events."""
    at = 0
    for _ in range(number):
        at = content.index(END, at) + len(END)
    return content[at:]


def ended(kept: StoredResponse, number: int) -> bytes:
    """Return the last event of a response that has none."""
    response = _response_decoder.decode(kept.answer)
    name = ENDINGS.get(response.status, "response.failed")
    event = StatusEvent(type=name, sequence_number=number, response=response)
    return sse.encode(msgspec.json.encode(event), name.encode())
