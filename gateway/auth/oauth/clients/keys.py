"""The keys at a client's `jwks_uri`, fetched and kept for a while.

A URI is asked a bounded number of times, however many assertions come by, whether it answers or
not; nobody whose keys are kept waits for one that is slow. How many are asked at once is
`egress`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from gateway.lru import Lru
from gateway.net.egress import Egress, EgressError

log = logging.getLogger(__name__)

KEPT_S = 300.0
RETRY_S = 30.0
"""One that did not answer is asked again after so long."""
MAX_KEPT = 1024


class ClientKeys:
    """One per process. `clock`: monotonic seconds."""

    def __init__(self, egress: Egress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._egress = egress
        self._clock = clock
        self._kept: Lru[str, tuple[float, dict[str, Any] | None]] = Lru(MAX_KEPT)
        self._fetches: dict[str, asyncio.Task[dict[str, Any] | None]] = {}

    async def close(self) -> None:
        fetches = list(self._fetches.values())
        for each in fetches:
            each.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def fetch(self, uri: str) -> dict[str, Any] | None:
        """The JWK Set, or None where there is none to be had."""
        kept = self._kept.get(uri)
        if kept is not None:
            lifetime_s = RETRY_S if kept[1] is None else KEPT_S
            if self._clock() - kept[0] < lifetime_s:
                return kept[1]
        if uri not in self._fetches:
            task = asyncio.create_task(self._ask(uri), name="fetch client keys")
            self._fetches[uri] = task
            task.add_done_callback(lambda _done: self._fetches.pop(uri))
        # Shielded: others wait for it too.
        return await asyncio.shield(self._fetches[uri])

    async def _ask(self, uri: str) -> dict[str, Any] | None:
        found = None
        try:
            found = (await self._egress.get(uri)).json_object()
        except EgressError as error:
            log.info("a client's keys cannot be had: %s", error)
        self._kept.put(uri, (self._clock(), found))
        return found
