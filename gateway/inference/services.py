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
from gateway.inference.hedge_budget import HedgeBudget
from gateway.inference.request_mover import RequestMover
from gateway.lanes import LaneDeadlines, SloTable
from gateway.limits.limiter import Limiter

MAX_ATTEMPT_S = 3600.0
"""One try on one replica ends by then."""
CacheSalts = Callable[[str], str]
"""org id -> prefix-cache namespace that no tenant can guess."""


class SharedDeadline:
    """Ends waits that last longer than `longest_s`, any number at a time, with one timer: starting
    one for each and stopping it again costs more than most of them wait."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._ends: dict[asyncio.Timeout, float] = {}
        """When each is over, by the loop's clock; the first comes first."""
        self._is_watched = False

    def begin(self, wait: asyncio.Timeout) -> None:
        """Bound a wait, which is under way, until `end`."""
        loop = asyncio.get_running_loop()
        self._ends[wait] = loop.time() + self._longest_s
        if not self._is_watched:
            self._is_watched = True
            loop.call_later(self._longest_s, self._look, loop)

    def end(self, wait: asyncio.Timeout) -> None:
        del self._ends[wait]

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what is over, and look again when the next one would be."""
        for wait, ends_at in self._ends.items():
            if ends_at > loop.time():
                loop.call_at(ends_at, self._look, loop)
                return
            if not wait.expired():
                wait.reschedule(loop.time())
        self._is_watched = False


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
    drain_timeout_s: float = 600.0
    """How long a generation stays at an engine that is to be taken away, while another one of its
    model serves."""
    hedges: HedgeBudget = msgspec.field(default_factory=lambda: HedgeBudget(0.0))
    """How many requests may be asked of a second replica while their first token is late."""
    mover: RequestMover | None = None
    """Moves requests that wait at an engine to another one; None: they stay."""
    deadlines: LaneDeadlines = LaneDeadlines()
    slos: SloTable = msgspec.field(default_factory=SloTable)
    """The service level objectives that requests are judged by."""
    on_cached: OnCached = unnoted
    """Hears what was read from caches of each prompt that is on a bill."""
    attempt_deadline: SharedDeadline = msgspec.field(
        default_factory=lambda: SharedDeadline(MAX_ATTEMPT_S)
    )
    open_calls: dict[asyncio.Task[None], Delivery] = msgspec.field(default_factory=dict)

    def sells_priority(self, model: str) -> bool:
        return self.price_book.sells(model, time.time(), "priority")
