"""Records what the engines keep for those who paid for it: heard from them, recorded, and
acknowledged once what a lease's end means is in the books.

An engine names a lease by the attempt that asked for it; whose that was is remembered here from the
asking on. What this process forgets with its end, or Postgres does not take, is refunded when its
event is booked and nobody has recorded a lease for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections import cache_leases
from billing.corrections.cache_leases import Lease, LeaseChange, LiveEngine
from billing.events import UsageEvent
from billing.ingestion.shipper import OnBooked
from engine.protocol import LeaseEnded, LeaseGranted
from engine.transport.client import Engine
from foundation.periodic import Flusher
from gateway.db import DATABASE_ERRORS
from gateway.fleet.engine.kept_prefixes import KeepRequest
from gateway.limits.recounts import recounting
from gateway.lru import Lru
from gateway.settings.models import ModelConfig
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 2.0
SWEEP_TIMEOUT_S = 10.0
MAX_ASKED = 65_536
"""Attempts whose leases may yet be granted."""
RECORD_RETRY_S = 0.5
RECORD_FOR_S = 20.0
"""A lease that Postgres does not take for so long is refunded."""
NOBODYS_AFTER_S = 7200.0
"""Longer than an attempt lasts and takes to be booked: after that no event will come for it."""

Count = Callable[[str, str, int], None]
"""Counts the leases of a model (first argument) by their outcome (second)."""


class CacheLeases(Flusher):
    """The leases that engines keep; one per process. `db`: of a role that sees every org's rows;
    `count`: for the metrics."""

    def __init__(
        self,
        db: AsyncEngine,
        redis: Redis,
        models: Iterable[ModelConfig],
        count: Count,
        listener: WorkListener | None = None,
    ) -> None:
        super().__init__(
            "sweep cache leases",
            lambda: SWEEP_INTERVAL_S if listener is None else listener.rest_s(SWEEP_INTERVAL_S),
            apart_s=SWEEP_INTERVAL_S,
        )
        if listener is not None:
            listener.watch("cache leases", self.wake, cache_leases.NEXT_DUE)
        self._db = db
        self._redis = redis
        self._leased_models = frozenset(leased_models(models))
        self._count = count
        self._asked: Lru[str, KeepRequest] = Lru(MAX_ASKED)
        self._engines: Mapping[str, Engine] = {}
        self._alive: dict[str, LiveEngine] = {}

    def watch(self, engines: Mapping[str, Engine]) -> None:
        """Watch the engines by where they are (`place_of`)."""
        self._engines = engines

    def follow(self, models: Iterable[ModelConfig]) -> None:
        """Take up other models. What was asked of one that is gone is still booked as leased."""
        self._leased_models |= frozenset(leased_models(models))

    def asked(self, attempt_id: str, asked: KeepRequest) -> None:
        self._asked.put(attempt_id, asked)

    async def heard(self, place: str, event: LeaseGranted | LeaseEnded) -> bool:
        """Record what an engine says. False: it is not in the books, and wants to be said again."""
        if isinstance(event, LeaseGranted):
            return await self._granted(place, event)
        attempt_id = event.lease_id.rpartition(":")[0]
        try:
            changed = await cache_leases.end(
                self._db, event.lease_id, attempt_id, is_broken=event.is_broken
            )
        except DATABASE_ERRORS as error:
            log.warning("the end of lease %s has to wait: %r", event.lease_id, error)
            return False
        if changed is None:
            return made_before(attempt_id, time.time() - NOBODYS_AFTER_S)
        self._note(Counter(changed))
        return True

    async def booked(self, events: Sequence[UsageEvent]) -> None:
        """Raises what Postgres raises; safe to repeat."""
        leased = [event for event in events if event.attempt.model in self._leased_models]
        await cache_leases.note_writes(self._db, leased)

    async def flush(self) -> None:
        self._look_at_engines()
        try:
            async with asyncio.timeout(SWEEP_TIMEOUT_S):
                alive = [*self._alive.values()]
                async with recounting(self._db, self._redis) as announce:
                    self._note(await cache_leases.sweep(self._db, alive, announce))
        except (*DATABASE_ERRORS, RedisError) as error:
            log.warning("cache leases are swept later (%s)", type(error).__name__)

    async def _granted(self, place: str, event: LeaseGranted) -> bool:
        asked = self._asked.get(event.request_id)
        if asked is None:
            log.error("lease %s is of no attempt that is known here", event.lease_id)
            return False
        index, now = int(event.lease_id.rpartition(":")[2]), time.time()
        lease = Lease(
            id=event.lease_id,
            org_id=asked.org_id,
            event_id=event.request_id,
            model=asked.model,
            engine=place,
            engine_id=asked.engine_id,
            ttl=asked.breakpoints[index].ttl,
            num_tokens=event.num_tokens,
            end_tokens=asked.breakpoints[index].position,
            prefix=asked.prefixes[index],
            granted_at=now,
            asked_at=asked.asked_at,
        )
        while time.time() < now + RECORD_FOR_S:
            try:
                changed = await cache_leases.grant(self._db, lease)
            except DATABASE_ERRORS as error:
                log.warning("lease %s is not recorded yet: %r", lease.id, error)
                await asyncio.sleep(RECORD_RETRY_S)
            else:
                self._count(lease.model, "granted", 1)
                self._note(Counter(changed))
                self.wake()  # it looks after the engines while a lease is open
                return True
        return False

    def _look_at_engines(self) -> None:
        """Look at which engines are there. One that is away has what it had: another process in its
        place will say so."""
        now = time.time()
        self._alive = {
            place: self._seen(place, engine.status.engine_id, now)
            for place, engine in self._engines.items()
            if engine.connected
        }

    def _seen(self, place: str, engine_id: str, now: float) -> LiveEngine:
        known = self._alive.get(place)
        if known is not None and known.engine_id == engine_id:
            return known
        return LiveEngine(place, engine_id, now)

    def _note(self, changed: Counter[LeaseChange]) -> None:
        for (model, outcome), number in changed.items():
            self._count(model, outcome, number)


def place_of(address: str) -> str:
    """Return where an engine is, for all gateways of an installation: a Unix socket is its
    host's."""
    return f"{socket.gethostname()}/{address}" if address.startswith("unix:") else address


def leased_models(models: Iterable[ModelConfig]) -> list[str]:
    """Return the models whose cache writes are proved by leases."""
    return [
        name
        for model in models
        if model.cache_contract == "explicit"
        for name in (model.name, *(each.name for each in model.adapters))
    ]


def made_before(attempt_id: str, moment: float) -> bool:
    """Tell whether an attempt was made before a moment, by the time in its UUIDv7 (RFC 9562,
    section 5.7)."""
    try:
        return (UUID(attempt_id).int >> 80) / 1000 < moment
    except ValueError:
        return True


def both(first: OnBooked, second: OnBooked) -> OnBooked:
    async def tell(events: Sequence[UsageEvent]) -> None:
        await first(events)
        await second(events)

    return tell
