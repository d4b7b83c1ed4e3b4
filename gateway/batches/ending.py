"""Ends lines together, as many as wait: a commit costs more than a line in it. Who ends a line
waits until it is committed with what it used, or until somebody else has taken it over; then what
was used is the house's waste."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import UsageEvent, as_waste
from billing.ingestion.settle_late import settle_late
from billing.ingestion.shipper import OnBooked, is_refusal
from billing.spool.spool import Spool
from gateway.batches import lines
from gateway.batches.endpoints import LineEndpoint
from gateway.batches.lines import MAX_ENDED_AT_ONCE, EndedLine
from gateway.batches.running import LineAccount, refused
from gateway.db import DATABASE_ERRORS
from gateway.http_errors.table import SERVER, http_error
from gateway.request_log.answers import (
    Note,
    NotedAnswer,
    RequestOwner,
    note_nothing,
    sum_up,
    to_row,
)
from gateway.request_log.content_log import ContentLog
from gateway.request_log.rows import RequestRow
from gateway.request_log.writer import RequestLog
from gateway.secret import Cipher
from gateway.telemetry.metrics import Telemetry

log = logging.getLogger(__name__)

RETRY_S = 0.5
UNBOOKABLE = http_error(500, "What this request used could not be booked.", SERVER)


class PendingEnd(msgspec.Struct, frozen=True):
    """A line whose end is to be booked. `noted`: it as an answer, but for the status."""

    ended: EndedLine
    account: LineAccount
    noted: NotedAnswer
    done: asyncio.Future[None]

    def to_row(self, telemetry: Telemetry) -> RequestRow:
        """Make its row: what it used and cost is what is booked."""
        line = self.ended.line
        owner = RequestOwner(
            org=line.org_id,
            project=line.project_id,
            key=line.key_id,
            model=telemetry.label(self.noted.model),
            lane="batch",
            batch=line.batch_id,
            tags=line.tags,
        )
        answer = self.answer
        return to_row(owner, answer, *sum_up(answer.billed))

    @property
    def answer(self) -> NotedAnswer:
        """Return it as an answer: what it used is what is booked."""
        billed = [event for event in self.ended.events if event.kind == "usage"]
        ended = self.ended
        return self.noted._replace(
            status=str(ended.status), bills=billed, error_code=ended.error_code
        )


class LineEnder:
    """Ends the lines of one runner. `db`: of a role that sees every org's rows."""

    def __init__(
        self,
        db: AsyncEngine,
        cipher: Cipher,
        holder: str,
        spool: Spool,
        endpoints: Mapping[str, LineEndpoint],
        on_booked: OnBooked,
        request_log: RequestLog,
        telemetry: Telemetry,
        content_log: ContentLog | None = None,
    ) -> None:
        self._content_log = content_log
        self._request_log, self._telemetry = request_log, telemetry
        self._db, self._cipher, self._holder, self._spool = db, cipher, holder, spool
        self._endpoints, self._on_booked = endpoints, on_booked
        self._waiting: list[PendingEnd] = []
        """Lines that wait for their end to be booked; there are no more than run at once."""
        self._filled = asyncio.Event()
        self.note: Note = note_nothing
        """Hears of each line that has ended here."""

    async def end(self, ended: EndedLine, account: LineAccount, noted: NotedAnswer) -> None:
        """End a line. `noted`: it as an answer, whose status is the line's."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(PendingEnd(ended, account, noted, done))
        self._filled.set()
        await done

    async def waste(self, events: Sequence[UsageEvent], account: LineAccount) -> None:
        """Book an attempt that ends nothing as waste. Raises: SpoolError."""
        if events:
            await self._spool.close(*as_waste(events))
        for callback in account.kept:
            await callback()

    async def end_forever(self) -> None:
        while True:
            await self._filled.wait()
            together = self._waiting[:MAX_ENDED_AT_ONCE]
            del self._waiting[:MAX_ENDED_AT_ONCE]
            if not self._waiting:
                self._filled.clear()
            try:
                await self._end_all(together)
            except Exception as error:
                for each in together:
                    if not each.done.done():
                        each.done.set_exception(error)
            for each in together:
                if not each.done.done():
                    each.done.set_result(None)

    async def _end_all(self, together: Sequence[PendingEnd]) -> None:
        """End all of them, however long Postgres is away."""
        rows = {each.ended.line.place: each.to_row(self._telemetry) for each in together}

        async def note(conn: AsyncConnection, kept: Sequence[EndedLine]) -> None:
            await self._request_log.write_within(conn, [rows[each.line.place] for each in kept])

        while True:
            try:
                await self._request_log.keep_days_of(rows.values())
                ended = [each.ended for each in together]
                kept = await lines.end(self._db, self._cipher, self._holder, ended, note)
                break
            except (*DATABASE_ERRORS, ValueError, OverflowError) as error:
                if isinstance(error, (DBAPIError, ValueError, OverflowError)) and is_refusal(error):
                    await self._end_apart(together, error)
                    return
                log.warning("%d lines end later (%s)", len(together), type(error).__name__)
                await asyncio.sleep(RETRY_S)
        mine = {each.line.place for each in kept}
        for each in together:
            if each.ended.line.place not in mine:
                await self.waste(each.ended.events, each.account)
                continue
            for callback in each.account.kept:
                await callback()
            await self._store_content(each, rows[each.ended.line.place])
            self.note(each.answer)
        await self._tell([event for each in kept for event in each.events])

    async def _store_content(self, each: PendingEnd, row: RequestRow) -> None:
        """Store what a line asked and was answered, where its project wants that."""
        content = None if each.noted.meter is None else each.noted.meter.content
        if content is not None and self._content_log is not None:
            await asyncio.to_thread(self._content_log.put, row, content)

    async def _end_apart(self, together: Sequence[PendingEnd], error: Exception) -> None:
        """End them one by one, since one of them is what Postgres will never take: it blocks no
        other."""
        if len(together) > 1:
            middle = len(together) // 2
            await self._end_all(together[:middle])
            await self._end_all(together[middle:])
            return
        (broken,) = together
        log.error("Postgres refuses line %s: %r", broken.ended.line.place, error)
        for event in broken.ended.events:
            await self._spool.quarantine(event)
        if broken.ended.events:
            line = broken.ended.line
            failed = refused(self._endpoints[line.endpoint], line, UNBOOKABLE)
            await self._end_all([msgspec.structs.replace(broken, ended=failed)])

    async def _tell(self, events: list[UsageEvent]) -> None:
        """Tell whoever wants to know of what was booked; what they miss, the next counting
        knows."""
        try:
            await settle_late(self._db, events)
            await self._on_booked(events)
        except DATABASE_ERRORS as error:
            log.warning("not all was told of what batches used (%s)", type(error).__name__)
