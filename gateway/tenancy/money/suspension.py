"""Suspensions for invoices that nobody has paid: how workers hear of them.

Which invoice suspends whom `billing.invoices.suspension` says, and each credential is read with it;
`orgs` lifts it.
"""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from gateway.tenancy.changes import EVERYTHING, announce
from gateway.tenancy.errors import ChangeNotAnnounced

log = logging.getLogger(__name__)


async def tell_workers(redis: Redis) -> None:
    """Announce that somebody may be suspended, or is no longer. Never raises: it is said again."""
    try:
        await announce(redis, EVERYTHING)
    except ChangeNotAnnounced as error:
        log.warning("workers hear of a suspension later: %s", error.message)
