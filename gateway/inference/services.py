"""The services that generations share in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.fleet.router import Fleet
from gateway.inference.cache_notes import OnCached, unnoted
from gateway.inference.delivery import Delivery
from gateway.lanes import LaneDeadlines, SloTable
from gateway.limits.limiter import Limiter

CacheSalts = Callable[[str], str]
"""org id -> prefix-cache namespace that no tenant can guess."""


class GenerationServices(msgspec.Struct, kw_only=True):
    """The services that a generation needs of the process, wired once in `app`. Other settings
    replace the deadlines and the objectives."""

    fleet: Fleet
    limiter: Limiter
    spool: Spool
    price_book: PriceBook
    tasks: TaskSet
    cache_salts: CacheSalts
    stalled_reader_s: float
    max_resumes: int = 3
    """How often a generation goes on whose replica was lost amid it."""
    deadlines: LaneDeadlines = LaneDeadlines()
    slos: SloTable = msgspec.field(default_factory=SloTable)
    """The service level objectives that requests are judged by."""
    on_cached: OnCached = unnoted
    """Hears what was read from caches of each prompt that is on a bill."""
    open_calls: dict[asyncio.Task[None], Delivery] = msgspec.field(default_factory=dict)

    def sells_priority(self, model: str) -> bool:
        return self.price_book.sells(model, time.time(), "priority")
