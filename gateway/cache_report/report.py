"""Reports what of each key's prompts came from the cache, and what broke their prefixes: noted in
memory with each request, and written now and then.

Noting is a few entries of bounded dicts: no request waits for it, and no text and no token of a
prompt gets here, but for positions. What is noted and not yet written is lost by a kill -9, and
what a commit is not heard of may count twice: this is a report, no bill. The bill is
`usage_hourly`, which nothing here touches.

What does not fit is counted under a prefix called "other", never dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Attempt
from foundation.periodic import Flusher
from gateway.cache_report.rows import MAX_PREFIXES, OTHER, ReportCounts, RowId, forget_old, write
from gateway.db import DATABASE_ERRORS
from gateway.fleet.replica import MessagePlace
from gateway.generation_events import UNBROKEN, CacheCause
from gateway.inference.cache_notes import CacheNote, PrefixLabel, to_label
from gateway.lru import Lru
from gateway.wire.usage.cache_report import Break, PrefixKind

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 10.0
FLUSH_TIMEOUT_S = 20.0
FORGET_INTERVAL_S = 3600.0
HOUR_S = 3600
MAX_ROWS = 8_192
"""Between two flushes, under 2 KiB each; of what comes then a key has one row an hour and model,
and beyond twice as many its org has."""
MAX_PLACES = 16_384
"""Prefixes of which is known who had them last."""
MAX_LOCATING = 2
"""Breaks at once of which is looked for the message that they lie in; of others it is not said."""
MAX_LOCATED, MAX_LOCATED_ORG = 64, 16
"""The same between two flushes, and of one org."""
LOCATE_TIMEOUT_S = 5.0

_OTHER_KIND: PrefixKind = "other"


class CacheReport(Flusher):
    """The cache report's notes; one per process. `db`: of a role that sees every org's rows;
    `wall_clock`: Unix seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        *,
        interval_s: float = FLUSH_INTERVAL_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("cache report", interval_s)
        self._db = db
        self._wall_clock = wall_clock
        self._rows: dict[RowId, ReportCounts] = {}
        self._prefixes: dict[tuple[str, str, str, str, int], int] = {}
        """How many prefixes `_rows` has for each org, project, key, model and hour."""
        self._places: Lru[tuple[str, str, str, str], str] = Lru(MAX_PLACES)
        self._locating: set[asyncio.Task[None]] = set()
        self._located_of: Counter[str] = Counter()
        """By org, since the last flush."""
        self._forget_at = 0.0

    def note(self, note: CacheNote) -> None:
        """Note a request; never raises, and never waits."""
        attempt, usage = note.attempt, note.usage
        num_input = usage.prompt_tokens - usage.embedding_input
        if num_input <= 0:
            return  # an embedding takes no part
        label, found = to_label(note), note.outcome
        cause = self._cause(note, label)
        row = self._row(attempt, label)
        row.num_requests += 1
        row.input_tokens += num_input
        row.cached_tokens += usage.cache_read
        row.causes[cause] = row.causes.get(cause, 0) + 1
        if cause in UNBROKEN:
            return
        position = 0 if found is None else found.position
        entry = row.broke(
            cause,
            position,
            num_input - usage.cache_read,
            at=self._wall_clock(),
            request_id=attempt.request_id,
        )
        if note.locate is not None and entry.message is None and self._may_locate(attempt.org):
            self._locate(attempt.org, entry, note.locate(position))

    async def flush(self) -> None:
        if self._locating:
            await asyncio.wait(self._locating, timeout=LOCATE_TIMEOUT_S)
        rows, self._rows, self._prefixes = self._rows, {}, {}
        self._located_of.clear()
        left = list(rows)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while left:
                    left = await write(self._db, rows, left)
                await self._forget()
        except DATABASE_ERRORS as error:
            log.warning(
                "%d rows of the cache report not written (%s)", len(left), type(error).__name__
            )
            for each in left:
                self._take_back(each, rows[each])

    async def _forget(self) -> None:
        if self._wall_clock() >= self._forget_at:
            await forget_old(self._db)
            self._forget_at = self._wall_clock() + FORGET_INTERVAL_S

    def _cause(self, note: CacheNote, label: PrefixLabel) -> CacheCause:
        """Return the cause by its own engine, or by who had the prefix last."""
        reported: CacheCause = "unknown" if note.outcome is None else note.outcome.cause
        attempt = note.attempt
        place = (attempt.org, attempt.model, *label)
        before = self._places.get(place)
        if before != note.replica:
            self._places.put(place, note.replica)
        moved = before is not None and before != note.replica and label.kind != "short"
        missed = reported == "first" or (reported == "unknown" and not note.usage.cache_read)
        return "other_replica" if moved and missed else reported

    def _row(self, attempt: Attempt, label: PrefixLabel) -> ReportCounts:
        hour = int(attempt.admitted_at) // HOUR_S * HOUR_S
        scope = (attempt.org, attempt.project, attempt.key, attempt.model, hour)
        each = RowId(*scope, *label)
        found = self._rows.get(each)
        if found is not None:
            return found
        known = self._prefixes.get(scope, 0)
        if known >= MAX_PREFIXES or len(self._rows) >= MAX_ROWS:
            each = RowId(*scope, _OTHER_KIND, OTHER)
            if each not in self._rows and len(self._rows) >= 2 * MAX_ROWS:
                each = RowId(attempt.org, "", "", "", hour, _OTHER_KIND, OTHER)
        else:
            self._prefixes[scope] = known + 1
        return self._rows.setdefault(each, ReportCounts())

    def _take_back(self, each: RowId, counted: ReportCounts) -> None:
        """Take it back; what came meanwhile is added to it."""
        if len(self._rows) >= 2 * MAX_ROWS and each not in self._rows:
            each = RowId(each.org, "", "", "", each.hour, _OTHER_KIND, OTHER)
        self._rows.setdefault(each, ReportCounts()).add(counted)

    def _may_locate(self, org_id: str) -> bool:
        located = self._located_of
        return (
            len(self._locating) < MAX_LOCATING
            and located[org_id] < MAX_LOCATED_ORG
            and located.total() < MAX_LOCATED
        )

    def _locate(
        self, org_id: str, entry: Break, work: Coroutine[Any, Any, MessagePlace | None]
    ) -> None:
        """Locate breaks beside the requests."""

        async def locate() -> None:
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                place = await work
            if place is not None:
                entry.message, entry.message_index = place.path, place.index
                entry.role = place.role

        self._located_of[org_id] += 1
        task = asyncio.create_task(locate(), name="locate a break")
        self._locating.add(task)
        task.add_done_callback(self._located)

    def _located(self, task: asyncio.Task[None]) -> None:
        self._locating.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a break of a prefix was not located (%s)", type(error).__name__)
