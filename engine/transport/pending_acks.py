"""Receives what an engine says until a gateway has it on disk: taken in, recorded, acknowledged.

Knows neither the socket nor what the things mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Further ones are left to the engine, which offers them again."""
BATCH = 256
"""Recorded side by side (their fsyncs coalesce) and acked in one frame."""

T = TypeVar("T")


class Offers(Generic[T]):
    """Things of one kind. `record` makes one durable: it is acked unless that raises or returns
    False, and then offered again later, to this gateway and to others. The same one may come twice.
    Without a `record` everything waits for the next one."""

    def __init__(
        self, what: str, *, id_of: Callable[[T], str], ack: Callable[[list[T]], None]
    ) -> None:
        """what: one of them, in the log."""
        self.record: Callable[[T], Awaitable[bool | None]] | None = None
        self._what = what
        self._id_of = id_of
        self._ack = ack
        self._pending: dict[str, T] = {}
        self._has_pending = asyncio.Event()

    def take(self, offered: T) -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending[self._id_of(offered)] = offered
            self._has_pending.set()

    async def record_forever(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            try:
                await self._record_pending()
            except Exception:  # a bug: told, and these are offered again
                log.exception("no %s was recorded", self._what)

    async def _record_pending(self) -> None:
        while self._pending and self.record is not None:
            batch = list(self._pending.values())[:BATCH]
            recorded = await asyncio.gather(*map(self._record, batch))
            for offered in batch:
                del self._pending[self._id_of(offered)]
            if acked := [offered for offered, ok in zip(batch, recorded, strict=True) if ok]:
                self._ack(acked)

    async def _record(self, offered: T) -> bool:
        assert self.record is not None
        try:
            return await self.record(offered) is not False
        except Exception:  # whatever the callback met: not recorded, so not acked
            log.exception("the %s of %s was not recorded", self._what, self._id_of(offered))
            return False
