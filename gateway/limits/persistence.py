"""A settle that goes through in the end, though the limiter is away.

Above: `inference` (what this process admitted), `settlement` (what a crash left open). Below:
`verdicts`. It knows neither leases nor Redis: settling is idempotent by lease, so what went through
unseen is not done twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.limits.scripts import LimiterUnavailable
from gateway.limits.verdicts import Settlement

log = logging.getLogger(__name__)

RETRY_S, MAX_TRIES = 1.0, 60
"""A minute for Redis to come back."""


async def keep_settling(settle: Callable[[], Awaitable[Settlement]], *, lease_id: str) -> None:
    """Call `settle` until it goes through, MAX_TRIES times at most."""
    for _ in range(MAX_TRIES):
        try:
            await settle()
        except LimiterUnavailable:
            await asyncio.sleep(RETRY_S)
        else:
            return
    log.warning("the lease %s is left to its expiry", lease_id)
