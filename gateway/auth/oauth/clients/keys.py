"""Fetches the keys at a client's `jwks_uri`, and caches them.

A URI is fetched once per KEPT_S, or per RETRY_S while it fails, however many assertions arrive. The
egress client bounds concurrent fetches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from foundation.tasks import SharedTasks
from gateway.lru import Lru
from gateway.net.egress import Egress, EgressError

log = logging.getLogger(__name__)

KEPT_S = 300.0
RETRY_S = 30.0
"""The wait before a URI that failed is fetched again."""
MAX_KEPT = 1024


class ClientKeys:
    """One per process. `clock`: monotonic seconds."""

    def __init__(self, egress: Egress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._egress = egress
        self._clock = clock
        self._kept: Lru[str, tuple[float, dict[str, Any] | None]] = Lru(MAX_KEPT)
        self._fetches: SharedTasks[str, dict[str, Any] | None] = SharedTasks("fetch client keys")

    async def close(self) -> None:
        await self._fetches.close()

    async def fetch(self, uri: str) -> dict[str, Any] | None:
        """Return the JWK Set, or None if it cannot be fetched."""
        kept = self._kept.get(uri)
        if kept is not None:
            lifetime_s = RETRY_S if kept[1] is None else KEPT_S
            if self._clock() - kept[0] < lifetime_s:
                return kept[1]
        return await self._fetches.run(uri, partial(self._fetch, uri))

    async def _fetch(self, uri: str) -> dict[str, Any] | None:
        found = None
        try:
            found = (await self._egress.get(uri)).json_object()
        except EgressError as error:
            log.info("the keys of a client cannot be fetched: %s", error)
        self._kept.put(uri, (self._clock(), found))
        return found
