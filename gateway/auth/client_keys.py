"""The keys at a client's `jwks_uri`, fetched and kept for a while.

Above: `rfc7523_assertion`, by way of `wiring`. Below: `egress`. A URI is asked a bounded number of
times, however many assertions come by, whether it answers or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from gateway.egress import Egress, EgressError
from gateway.lru import Lru

log = logging.getLogger(__name__)

KEPT_S = 300.0
RETRY_S = 30.0
"""One that did not answer is asked again after so long."""
MAX_KEPT = 1024
MAX_AT_ONCE = 8


class ClientKeys:
    """One per process. `clock`: monotonic seconds."""

    def __init__(self, egress: Egress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._egress = egress
        self._clock = clock
        self._kept: Lru[str, tuple[float, dict[str, Any] | None]] = Lru(MAX_KEPT)
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(self, uri: str) -> dict[str, Any] | None:
        """The JWK Set, or None where there is none to be had."""
        async with self._slots:
            kept = self._kept.get(uri)
            if kept is not None:
                lifetime_s = RETRY_S if kept[1] is None else KEPT_S
                if self._clock() - kept[0] < lifetime_s:
                    return kept[1]
            found = await self._ask(uri)
            self._kept.put(uri, (self._clock(), found))
            return found

    async def _ask(self, uri: str) -> dict[str, Any] | None:
        try:
            return (await self._egress.get(uri)).json_object()
        except EgressError as error:
            log.info("a client's keys cannot be had: %s", error)
            return None
