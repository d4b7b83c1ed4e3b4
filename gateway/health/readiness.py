"""Decides whether this worker should be sent work, and tells how the parts are that it depends on.

It asks few and seldom: Redis, Postgres and the disk once in `PROBE_INTERVAL_S`. Engines report by
themselves, and an upstream is known by what requests saw of it: no request is made for its health.
The workers of an installation share that, so that one which no request has led there yet knows it.

Not ready (`missing`) is a worker that serves no request: its spool cannot record one, no replica is
there that could run one, it drains, or its start is not over. All else is degraded: an upstream
that refuses this gateway does so to every worker, and only a request shows that it no longer does;
keys are cached while Postgres is away, and each worker has its share of the limits while Redis is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import SpoolBroken
from billing.ingestion.shipper import Shipper
from billing.spool.quarantine import Quarantine
from billing.spool.spool import Spool
from foundation.periodic import Periodic
from gateway.db import DATABASE_ERRORS
from gateway.fleet.contact import Contact, Observation
from gateway.fleet.replica import ObservedReplica, Replica, is_observed
from gateway.fleet.router import Fleet
from gateway.health.component import Component, Health, Kind, State, Status, replica_component
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 2.0
QUIET_S = 45.0
"""Postgres is not probed while nobody asks how it is and its notifications are heard, on a
connection whose loss is noticed at once and on which it answered so lately."""
PROBE_TIMEOUT_S = 2.0
"""Bounds the probe of each store."""
FULL_BYTES = 256 * 1024
"""With less room the disk counts as full before a write fails: a few requests would fill it."""
LOW_BYTES, LOW_SHARE = 64 * 1024 * 1024, 0.05
"""The disk runs low below either of them, whichever is less."""
OBSERVATIONS_KEY = "tollgate:observations"
OBSERVATIONS_KEPT_S = 24 * 60 * 60
"""Observations are kept this long after the last change of any upstream."""
ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Observation)


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what was last seen of the disk under the spool."""

    free_bytes: int
    total_bytes: int
    num_quarantined: int

    @property
    def is_full(self) -> bool:
        return 0 < self.total_bytes and self.free_bytes < FULL_BYTES

    @property
    def is_low(self) -> bool:
        return self.free_bytes < min(LOW_BYTES, LOW_SHARE * self.total_bytes)


class Store(msgspec.Struct):
    """Holds what was last heard of Postgres or Redis."""

    state: State = "unknown"
    detail: str | None = None
    last_error: str | None = None
    last_error_at: int | None = None

    def answered(self) -> None:
        self.state, self.detail = "ok", None

    def failed(self, error: Exception, state: State, detail: str | None = None) -> None:
        """Keep the kind of an error: its text may hold an address or a row."""
        cause = getattr(error, "orig", None) or error
        self.state, self.detail, self.last_error = state, detail, type(cause).__name__
        self.last_error_at = int(time.time())


class SharedObservations:
    """Shares among the workers of an installation what each saw of its upstreams, in one hash of
    Redis: a change is written within seconds. `redis` must not decode responses."""

    def __init__(self, redis: Redis, replicas: Iterable[ObservedReplica]) -> None:
        self._redis = redis
        self._contacts: dict[bytes, Contact] = {
            each.identity.encode(): each.contact for each in replicas
        }

    async def exchange(self) -> None:
        """Write what was seen here since the last time, and learn what others saw.

        Raises: RedisError, OSError.
        """
        if not self._contacts:
            return
        stored = await self._redis.hmget(OBSERVATIONS_KEY, list(self._contacts))
        news: dict[Any, bytes] = {}
        for (identity, contact), value in zip(self._contacts.items(), stored, strict=True):
            known = self._decode(value)
            contact.heard(known)
            if contact.observation.seen_at > known.seen_at:
                news[identity] = ENCODER.encode(contact.observation)
        if news:
            await self._redis.hset(OBSERVATIONS_KEY, mapping=news)
            await self._redis.expire(OBSERVATIONS_KEY, OBSERVATIONS_KEPT_S)

    @staticmethod
    def _decode(stored: Any) -> Observation:
        if stored is None:
            return Observation()
        try:
            return DECODER.decode(stored)
        except msgspec.DecodeError:  # of another version
            return Observation()


class Readiness:
    """The readiness of one process; `begin_drain` turns it red for good."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        redis: Redis,
        spool: Spool,
        db: AsyncEngine | None = None,
        shipper: Shipper | None = None,
        listener: WorkListener | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._listener = listener
        self._was_asked, self._postgres_at = False, -math.inf
        self._probing = Periodic(
            "probe", PROBE_INTERVAL_S, self.probe, log=log, failure="the stores are not probed"
        )
        self._fleet, self._redis, self._spool = fleet, redis, spool
        self._db, self._shipper, self._clock = db, shipper, clock
        self._draining = False
        self._redis_seen = False
        self._never_seen = {
            route.model: route.replicas
            for route in fleet.routes
            if route.kind == "engine" and not route.is_asleep
        }
        self._stores: dict[Kind, Store] = {"postgres": Store(), "redis": Store()}
        self._disk: Disk | None = None
        self._since: dict[tuple[Kind, str], tuple[State, int]] = {}
        self._observations = self._shared_observations()

    def begin_drain(self) -> None:
        self._draining = True

    def follow(self) -> None:
        """Take up what the fleet serves now. A model that came later is not waited for: while it is
        away the others are served."""
        served = {r.model: r.replicas for r in self._fleet.routes if not r.is_asleep}
        self._never_seen = {model: served[model] for model in self._never_seen if model in served}
        self._observations = self._shared_observations()

    def _shared_observations(self) -> SharedObservations:
        replicas = (each for route in self._fleet.routes for each in route.replicas)
        observed = [each for each in replicas if is_observed(each)]
        return SharedObservations(self._redis, observed)

    def observe(self) -> None:
        """Note which engines are connected: each must have been so once before the start is
        over."""
        self._never_seen = {
            model: replicas
            for model, replicas in self._never_seen.items()
            if not any(may_serve(replica) for replica in replicas)
        }

    @property
    def free_bytes(self) -> int | None:
        """The room on the disk of the spool, as it was last seen."""
        return None if self._disk is None else self._disk.free_bytes

    @property
    def num_quarantined(self) -> int:
        """The number of records of this host's spools that wait for a person, as last seen."""
        return 0 if self._disk is None else self._disk.num_quarantined

    async def missing(self) -> list[str]:
        """Return what keeps this worker from taking, limiting, running and billing a request.

        Empty when it is ready.

        At the start every engine is waited for ("model NAME"). One that leaves afterwards takes
        only its own model away: the others go on being served while any replica is there.
        Postgres is not among it: keys are cached and usage waits in the spool. Nor is Redis once
        the start is over: it would be away for all workers, and each has its share of the limits.
        """
        found = []
        if self._draining:
            found.append("draining")
        if not self._spool.healthy or (self._disk is not None and self._disk.is_full):
            found.append("spool")
        self.observe()
        found += [f"model {model}" for model in self._never_seen]
        if not any(
            route.kind == "upstream" or route.is_asleep or may_serve(replica)
            for route in self._fleet.routes
            for replica in route.replicas
        ):
            found.append("replicas")
        if not await self.has_seen_redis():
            found.append("redis")
        return found

    async def has_seen_redis(self) -> bool:
        """Return whether Redis answers now, or has since the start."""
        if not self._redis_seen:
            try:
                self._redis_seen = bool(await self._redis.ping())
            except (RedisError, OSError):
                return False
        return self._redis_seen

    async def health(self) -> Health:
        self._was_asked = True
        if time.monotonic() - self._postgres_at > 2 * PROBE_INTERVAL_S:
            self._probing.wake()  # whoever asks again soon is told of now
        missing, components = await self.missing(), self.components()
        is_good = all(each.is_good for each in components)
        status: Status = "unready" if missing else "ready" if is_good else "degraded"
        return Health(status=status, missing=missing, components=components)

    def components(self) -> list[Component]:
        return [self._dated(each) for each in self._components()]

    def _components(self) -> Iterator[Component]:
        yield self._spool_component()
        for kind, store in self._stores.items():
            yield Component(
                kind=kind,
                name=kind,
                state=store.state,
                reachable=None if store.state == "unknown" else store.state != "unreachable",
                detail=store.detail,
                last_error=store.last_error,
                last_error_at=store.last_error_at,
            )
        for route in self._fleet.routes:
            for replica in () if route.is_asleep else route.replicas:
                yield replica_component(route.kind, replica)

    def _spool_component(self) -> Component:
        failure, disk = self._spool.failure, self._disk
        state: State = "ok"
        detail = None
        if isinstance(failure, SpoolBroken):
            state, detail = "broken", "a sync failed: this worker leaves"
        elif failure is not None or (disk is not None and disk.is_full):
            state, detail = "full", "no usage can be recorded, so no request is taken"
        elif disk is not None and disk.num_quarantined:
            state, detail = "quarantine", f"{disk.num_quarantined} records wait for a person"
        elif disk is not None and disk.is_low:
            state, detail = "low_space", f"{disk.free_bytes >> 20} MiB are free"
        return Component(kind="spool", name="spool", state=state, detail=detail)

    def _dated(self, component: Component) -> Component:
        """Add since when it is so, where the part does not know it by itself."""
        if component.since is not None or component.state == "unknown":
            return component
        key = (component.kind, component.name)
        state, since = self._since.get(key, (None, 0))
        if state != component.state:
            since = int(self._clock())
            self._since[key] = (component.state, since)
        return msgspec.structs.replace(component, since=since)

    def periodic_probe(self) -> Periodic:
        return self._probing

    async def probe(self) -> None:
        """Look after the stores and the disk, once each."""
        await asyncio.gather(self._probe_redis(), self._probe_postgres(), self._look_at_disk())

    async def _probe_redis(self) -> None:
        store = self._stores["redis"]
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._redis.ping()
                await self._observations.exchange()
        except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
            store.failed(error, "unreachable")
        except RedisError as error:  # it cannot write, say
            store.failed(error, "failing")
        else:
            store.answered()

    async def _probe_postgres(self) -> None:
        if self._db is None or not self._is_postgres_due():
            return
        self._was_asked, self._postgres_at = False, time.monotonic()
        store = self._stores["postgres"]
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._db.connect() as connection:
                await connection.exec_driver_sql("SELECT 1")
        except DATABASE_ERRORS as error:
            store.failed(error, "unreachable")
            return
        if self._shipper is not None and (failure := self._shipper.failure) is not None:
            store.failed(failure, "failing", "usage waits to be booked")
        else:
            store.answered()

    def _is_postgres_due(self) -> bool:
        if self._was_asked or self._stores["postgres"].state != "ok":
            return True
        if self._shipper is not None and self._shipper.failure is not None:
            return True
        return self._listener is None or self._listener.silent_s > QUIET_S

    async def _look_at_disk(self) -> None:
        self._disk = await asyncio.to_thread(look_at_disk, self._spool.directory)


def may_serve(replica: Replica) -> bool:
    """Tell whether nobody has to be waited for: it is there, or nobody knows whether it will be."""
    health = replica.health()
    return health.available or health.is_vacant


def look_at_disk(spool: Path) -> Disk:
    """Look at the disk that a spool's folder is on. Blocks. Raises: OSError."""
    found = os.statvfs(spool)
    num_free = found.f_bfree if os.geteuid() == 0 else found.f_bavail  # root may use the reserve
    return Disk(
        free_bytes=num_free * found.f_frsize,
        total_bytes=found.f_blocks * found.f_frsize,
        num_quarantined=Quarantine(spool.parent).count_unresolved(),
    )
