"""Follows the requests of an organization as they are written, for who watches.

However many watch, one task a worker asks Postgres once a second for what came of all their
organizations, and none does while nobody watches. Rows are written by many, so each round looks
back a little and leaves out what it has told. A watcher that does not read keeps the newest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.db import DATABASE_ERRORS
from gateway.request_log.search import FoundRequest, find_landed

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
LOOK_BACK_S = 5.0
"""A batch is committed so soon after its rows were stamped, or it is not shown."""
MOST_BACK_S = 60.0
"""After a Postgres that was away, no more is caught up with."""
MAX_OF_ORG = 200
"""Requests of an organization a round; of more the newest are told. No busy one keeps those of
others from being seen."""
MAX_UNREAD = 100
"""Requests that wait for one watcher."""
MAX_WATCHERS = 100
MAX_WATCHERS_OF_ORG = 25
"""No organization takes the places of all others."""
TIMEOUT_S = 5.0


class TooManyWatchers(Exception):
    """So many watch in this worker, of all or of one organization, that no other one may."""


class Watcher:
    """The requests that came and were not read yet."""

    def __init__(self, org: str) -> None:
        self.org = org
        self._unread: deque[FoundRequest] = deque(maxlen=MAX_UNREAD)
        self._has_some = asyncio.Event()
        self.has_ended = False
        self.num_skipped = 0
        """Those that came too fast to be read."""

    def tell(self, request: FoundRequest) -> None:
        self.num_skipped += len(self._unread) == MAX_UNREAD
        self._unread.append(request)
        self._has_some.set()

    def end(self) -> None:
        """Let who waits go: this worker leaves."""
        self.has_ended = True
        self._has_some.set()

    async def read(self, timeout_s: float | None = None) -> Sequence[FoundRequest]:
        """Wait for requests and return them, the oldest first; none after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_some.wait()
        except TimeoutError:
            return ()
        if not self.has_ended:
            self._has_some.clear()
        found = [*self._unread]
        self._unread.clear()
        return found


class LiveTail:
    """The one follower of a worker. `db`: of a role that sees every org's rows. `clock`: monotonic
    seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._clock = db, clock
        self._watchers: set[Watcher] = set()
        self._told: dict[str, float] = {}
        """The requests of the last rounds, and when they were told."""
        self._looked_at = clock()
        self._periodic = Periodic(
            "follow requests",
            interval_s,
            self._look,
            log=log,
            failure="requests are not shown as they come",
            expected=DATABASE_ERRORS,
            timeout_s=TIMEOUT_S,
        )

    @property
    def is_following(self) -> bool:
        return self._periodic.is_running

    @asynccontextmanager
    async def watching(self, org: str) -> AsyncIterator[Watcher]:
        """Watch an org as long as the context. Raises: TooManyWatchers."""
        of_org = sum(each.org == org for each in self._watchers)
        if len(self._watchers) >= MAX_WATCHERS or of_org >= MAX_WATCHERS_OF_ORG:
            raise TooManyWatchers
        watcher = Watcher(org)
        self._watchers.add(watcher)
        self._follow()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                await self._periodic.close()
                self._follow()  # somebody may have come meanwhile

    def leave(self) -> None:
        """Let all who watch go, so that this worker can leave."""
        for watcher in self._watchers:
            watcher.end()

    async def close(self) -> None:
        self.leave()
        await self._periodic.close()

    def _follow(self) -> None:
        if self._watchers and not self._periodic.is_running:
            self._looked_at, self._told = self._clock(), {}
            self._periodic.start()

    async def _look(self) -> None:
        now = self._clock()
        back_s = min(now - self._looked_at, MOST_BACK_S) + LOOK_BACK_S
        orgs = sorted({each.org for each in self._watchers})
        async with self._db.connect() as conn:
            found = await find_landed(conn, orgs, back_s, MAX_OF_ORG)
        self._looked_at = now
        oldest = now - 2 * (MOST_BACK_S + LOOK_BACK_S)
        self._told = {id_: at for id_, at in self._told.items() if at > oldest}
        for org, request in found:
            if request.id in self._told:
                continue
            self._told[request.id] = now
            for watcher in self._watchers:
                if watcher.org == org:
                    watcher.tell(request)
