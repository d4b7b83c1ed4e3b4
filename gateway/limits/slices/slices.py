"""Exchanges slices with Redis in the background, as long as an organization is busy here."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from foundation.request_context import outside_requests
from foundation.tasks import LogAndContinue, TaskSet, end_tasks
from gateway.ids import uuid7
from gateway.limits.redis.keys import org_keys
from gateway.limits.redis.outage import ScriptCall
from gateway.limits.redis.scope_limits import CounterCap, ScopeLimits
from gateway.limits.redis.scripts import LimiterUnavailable, ScriptFailed, Scripts
from gateway.limits.slices.ledger import (
    IDLE_S,
    MONEY,
    TTL_S,
    Clock,
    EndedRequest,
    Exchange,
    MoneyGrant,
    MoneySlice,
    OrgLedger,
    SliceGrant,
    SliceMiss,
    ToCall,
    UnitsByKind,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
LONGEST_TICK_S, WORTH_AN_EXCHANGE = 0.4, 64
"""An organization of which fewer requests have come is exchanged less often, unless a slice was too
small for one."""
BUSY_REQUESTS, BUSY_WITHIN_S = 8, 0.25
"""So many requests within that time make an organization busy."""
MIN_RATE = 10.0
"""Requests a second; with fewer, asking Redis for each of them is no dearer."""
STEADY = 0.7
"""The worth of the rate so far beside that of the last tick."""
MAX_REPEATS = 3
MAX_DROPPED = 4096
"""Organizations whose slices were dropped and not released; of more, the oldest are left to their
expiry."""
CLOSE_TIMEOUT_S = 1.0
DONE = 1


class _Org:
    """The slices of one busy organization. Its `worker` name is no other's: what is dropped is left
    to its expiry."""

    def __init__(self, org_id: str, worker: str, clock: Clock, rate: float) -> None:
        self.org_id, self.worker = org_id, worker
        self.ledger = OrgLedger(clock)
        self.lock = asyncio.Lock()
        self.is_dropped = False
        self.is_leaving = False
        """Too little comes for slices: they are given back."""
        self.is_wanting = False
        """Something was not to be had of slices since the last exchange."""
        self.rate, self.number = rate, 0
        self.turned_at = self.last_at = clock()

    def count(self, now: float) -> None:
        self.number += 1
        self.last_at = now

    def is_due(self, now: float) -> bool:
        """Tell whether an exchange is worth its price."""
        return (
            self.is_wanting
            or self.number >= WORTH_AN_EXCHANGE
            or now - self.turned_at >= LONGEST_TICK_S
            or now - self.last_at > IDLE_S
        )

    def turn(self, now: float) -> None:
        """Begin a tick."""
        self.is_wanting = False
        elapsed = max(now - self.turned_at, 0.001)
        self.rate = STEADY * self.rate + (1 - STEADY) * self.number / elapsed
        self.number, self.turned_at = 0, now
        self.is_leaving = self.rate < MIN_RATE or now - self.last_at > IDLE_S


class DroppedSlices(msgspec.Struct, frozen=True):
    """Slices that are used no more. Redis keeps the slots and the money of the requests that run on
    them, until those have leases."""

    org_id: str
    worker: str
    keys: list[str]


class Slices:
    """The slices of all organizations that one process holds. `defer`: settles when Redis is back;
    `on_lost` is told that Redis has lost some, `on_money` what it says of a counter of an
    organization. Idle until `start`."""

    def __init__(
        self,
        scripts: Scripts,
        *,
        defer: Callable[[str, ScriptCall], None],
        on_lost: Callable[[], None],
        on_money: Callable[[str, MoneySlice, MoneyGrant], None] = lambda org_id, part, found: None,
        lease_ttl_s: Callable[[], float],
        clock: Clock = time.monotonic,
    ) -> None:
        self._scripts, self._defer, self._on_lost, self._clock = scripts, defer, on_lost, clock
        self._lease_ttl_s, self._on_money = lease_ttl_s, on_money
        self._id = uuid7().hex
        self._num_names = 0
        self._is_started = False
        self._orgs: dict[str, _Org] = {}
        self._counts: dict[str, int] = {}
        """The requests of each organization that is not busy, in this stretch of BUSY_WITHIN_S."""
        self._counted_since = -math.inf
        self._covered: dict[str, UnitsByKind] = {}
        """By lease id, what requests have reserved of slices that were dropped: Redis takes it for
        used."""
        self._dropped: deque[DroppedSlices] = deque(maxlen=MAX_DROPPED)
        self._ticking: asyncio.Task[None] | None = None
        self._tasks = TaskSet()

    def start(self) -> None:
        self._is_started = True

    async def close(self) -> None:
        """Give all back that Redis takes in time."""
        self._is_started = False
        orgs = list(self._orgs.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*(self._exchange(org, returns=True) for org in orgs))
                self.drop_all()
                await self._tasks.wait()
        self.drop_all()
        if self._ticking is not None:
            await end_tasks(self._ticking)
        await self._tasks.close()

    # ---- requests

    def admit(
        self,
        org_id: str,
        lease_id: str,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        units: UnitsByKind,
        caps: Sequence[CounterCap] = (),
    ) -> tuple[list[int], int] | SliceMiss:
        """Reserve in all scopes and under all caps, and return the buckets' full moments, and
        Redis' time; or return why Redis is to be asked."""
        org = self._orgs.get(org_id)
        if org is None or org.is_leaving:
            return "quiet"
        slices = org.ledger.admit(lease_id, keys, scopes, units, caps)
        if isinstance(slices, str):
            org.is_wanting |= slices in ("none", "short")
            return slices
        org.count(self._clock())
        return org.ledger.full_moments(scopes, slices)

    def count(self, org_id: str) -> bool:
        """Count a request that Redis has let pass. Many of them make the organization busy; True:
        it is, and `note` is to be told what was asked for."""
        if not self._is_started:
            return False
        now, org = self._clock(), self._orgs.get(org_id)
        if org is None:
            if now - self._counted_since > BUSY_WITHIN_S:
                self._counts, self._counted_since = {}, now
            number = self._counts[org_id] = self._counts.get(org_id, 0) + 1
            if number < BUSY_REQUESTS:
                return False
            self._num_names += 1
            rate = BUSY_REQUESTS / BUSY_WITHIN_S
            org = _Org(org_id, f"{self._id}:{self._num_names}", self._clock, rate)
            self._orgs[org_id] = org
            self._tick()
        org.count(now)
        return True

    def note(
        self,
        org_id: str,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        units: UnitsByKind,
        caps: Sequence[CounterCap] = (),
    ) -> None:
        """Note what a request of a busy organization has taken from Redis."""
        self._orgs[org_id].ledger.note(keys, scopes, units, caps)

    def are_held(self, org_id: str) -> bool:
        """Tell whether there may be slices of the organization here."""
        return org_id in self._orgs

    def is_young(self, org_id: str, lease_id: str) -> bool:
        """Tell whether Redis knows nothing of the request, for it runs on a slice."""
        org = self._orgs.get(org_id)
        return org is not None and lease_id in org.ledger.young

    def covered(self, lease_id: str) -> UnitsByKind:
        """Return what is paid for of a request whose slice was dropped."""
        return self._covered.get(lease_id, {})

    def renewed(self, lease_id: str) -> None:
        """Note that Redis has a lease of the request, that says what is paid for."""
        self._covered.pop(lease_id, None)

    async def extend(self, org_id: str, lease_id: str, units: UnitsByKind) -> bool:
        """Reserve more for a young request. False: it has a lease now, to be extended in Redis."""
        org = self._orgs[org_id]
        if org.ledger.extend(lease_id, units):
            return True
        org.ledger.register([lease_id])
        await self._exchange(org)
        return False

    def settle(
        self,
        org_id: str,
        lease_id: str,
        used: UnitsByKind,
        to_call: ToCall,
        counters: Sequence[str] = (),
    ) -> bool:
        """Settle a young request, or let the next exchange settle a lease. `counters`: those it
        spends from; near a cap what it leaves is there at once. False: Redis is to be told at
        once."""
        org = self._orgs.get(org_id)
        if org is None:
            return False
        if lease_id in org.ledger.young:
            org.ledger.settle(lease_id, used, to_call)
        elif org.is_leaving or not org.ledger.are_usable(counters):
            return False
        else:
            org.ledger.close(lease_id, used, to_call(used))
        return True

    def is_closing(self, org_id: str, lease_id: str) -> bool:
        org = self._orgs.get(org_id)
        return org is not None and lease_id in org.ledger.closing

    def take_covered(self, lease_id: str) -> UnitsByKind:
        """Return what is paid for of a request whose slice was dropped, and which ends now."""
        return self._covered.pop(lease_id, {})

    async def exchange(self, org_id: str) -> None:
        """Exchange the organization's slices now: of a scope that is scarce all is given back."""
        org = self._orgs.get(org_id)
        if org is not None:
            await self._exchange(org)

    # ---- in the background

    def _tick(self) -> None:
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(
                self._run(), name="exchange slices", context=outside_requests()
            )

    async def _run(self) -> None:
        log_and_continue = LogAndContinue(log, "slices are not exchanged")
        while self._orgs:
            await asyncio.sleep(TICK_S)
            with log_and_continue:
                await asyncio.gather(*(self._turn(org) for org in list(self._orgs.values())))

    async def _turn(self, org: _Org) -> None:
        now = self._clock()
        if not org.is_due(now):
            return
        org.turn(now)
        await self._exchange(org, returns=org.is_leaving)
        if org.is_leaving and not org.is_dropped and org.ledger.is_empty():
            del self._orgs[org.org_id]
            org.is_dropped = True

    async def _exchange(self, org: _Org, *, returns: bool = False) -> None:
        """Exchange once, to its end: whoever waits for it may be cancelled."""
        work = self._exchange_in_turn(org, returns=returns)
        await asyncio.shield(self._tasks.spawn(work, name="exchange the slices of an organization"))

    async def _exchange_in_turn(self, org: _Org, *, returns: bool) -> None:
        async with org.lock:
            for _ in range(MAX_REPEATS):
                if org.is_dropped:
                    return
                done = org.ledger.begin(returns=returns)
                if done.is_needless:
                    return
                reply = await self._ask(org, done)
                if reply is None or reply[0] != DONE:
                    self._drop(org)
                    self._give_up(org, done)
                    if reply is not None:
                        self._on_lost()
                    return
                self._settle_unknown(done.closed, reply[2])
                at = 3 + len(done.reports)
                granted, money = to_granted(reply[3:at]), [MoneyGrant(*each) for each in reply[at:]]
                wanted_back = org.ledger.complete(done, granted, money, reply[1])
                for part, found in zip(done.money, money, strict=True):
                    self._on_money(org.org_id, part, found)
                if org.is_dropped:
                    self._give_up(org, None)
                if not wanted_back:
                    return

    async def _ask(self, org: _Org, done: Exchange) -> list[Any] | None:
        """Return the answer of `exchange.lua`. None: there is none."""
        keys = [*org_keys(org.org_id), *(part.key for part in (*done.slices, *done.money))]
        places = {part.key: place for place, part in enumerate(done.slices, 1)}
        paying = {part.key: place for place, part in enumerate(done.money, 1)}
        groups = defaultdict[Any, list[tuple[str, UnitsByKind]]](list)
        for young in done.opened:
            of_scopes = tuple(places[part.key] for part in young.scopes)
            of_money = tuple(paying[part.key] for part in young.money)
            groups[of_scopes, of_money].append((young.lease_id, young.units))
        opened = [(*group, to_rows(leases)) for group, leases in groups.items()]
        closed = to_rows([(each.lease_id, each.used) for each in done.closed])
        spent = [
            (each.lease_id, each.nano, [paying[part.key] for part in each.slices])
            for each in done.spent
        ]
        ttls = int(TTL_S * 1_000_000), int(self._lease_ttl_s() * 1_000_000)
        asked = (
            *(org.worker, *ttls, closed, opened),
            *(done.reports, done.money_reports, spent),
        )
        try:
            found: list[Any] = await self._scripts.call("exchange", keys, asked)
        except LimiterUnavailable as error:
            log.info("slices of %s are dropped: %s", org.org_id, error)
            return None
        return found

    # ---- what is lost

    def dropped(self) -> list[DroppedSlices]:
        """Return the slices that were dropped. Once all requests that ran on them have leases, they
        are to be released."""
        return list(self._dropped)

    async def release(self, dropped: Sequence[DroppedSlices]) -> None:
        """Raises: LimiterUnavailable."""
        for each in dropped:
            with suppress(ScriptFailed):  # it was logged; they are left to their expiry
                keys = [*org_keys(each.org_id), *each.keys]
                await self._scripts.call("release", keys, (each.worker,))
            with suppress(ValueError):  # there were too many
                self._dropped.remove(each)

    def drop_all(self) -> None:
        """Let go of all slices: Redis is away."""
        for org in list(self._orgs.values()):
            self._drop(org)
            if not org.lock.locked():
                self._give_up(org, None)

    def _drop(self, org: _Org) -> None:
        """Use no slice of it any more. Whoever exchanges them now gives up the rest."""
        if org.is_dropped:
            return
        org.is_dropped = True
        del self._orgs[org.org_id]
        self._cover(org.ledger.young.values())
        org.ledger.young = {}

    def _cover(self, requests: Any) -> None:
        """Note that what they reserved is paid for, but for money: what is held of it is free again
        when their slice expires, and what they spend is counted."""
        for young in requests:
            self._covered[young.lease_id] = {**young.units, MONEY: 0}

    def _give_up(self, org: _Org, failed: Exchange | None) -> None:
        """Settle one by one what an exchange would have settled, and what `failed` may have."""
        if org.ledger.slices or org.ledger.money:
            self._dropped.append(DroppedSlices(org.org_id, org.worker, [*org.ledger.slices]))
        closing, exceeded = list(org.ledger.closing.values()), org.ledger.exceeded
        spent = org.ledger.spent
        org.ledger.closing, org.ledger.exceeded, org.ledger.spent = {}, [], []
        if failed is not None:
            self._cover(failed.opened)
            closing += failed.closed
            exceeded = [*failed.exceeded, *exceeded]
            spent = [*failed.spent, *spent]
        for ended in closing:
            self._settle_alone(ended)
        for ended in exceeded:
            self._settle_alone(ended)
        for each in spent:
            self._tasks.spawn(self._settle(each.lease_id, each.call), name="settle a request")

    def _settle_unknown(self, closed: Sequence[EndedRequest], unknown: Sequence[bytes]) -> None:
        """Settle what had expired or was forgotten, so that it is debited."""
        ids = {each.decode() for each in unknown}
        for ended in closed:
            if ended.lease_id in ids:
                self._settle_alone(ended)

    def _settle_alone(self, ended: EndedRequest) -> None:
        call = ended.call
        if ended.lease_id in self._covered:
            call = ScriptCall(call.keys, (*call.asked, self.take_covered(ended.lease_id)))
        self._tasks.spawn(self._settle(ended.lease_id, call), name="settle a lease")

    async def _settle(self, lease_id: str, call: ScriptCall) -> None:
        try:
            await self._scripts.call("settle", call.keys, call.asked)
        except ScriptFailed:
            return  # it was logged; the lease is left to its expiry
        except LimiterUnavailable:
            self._defer(lease_id, call)


def to_rows(leases: Sequence[tuple[str, UnitsByKind]]) -> tuple[list[str], list[str | int]]:
    """Return the ROWS of `exchange.lua`: the kinds, then of each lease its id and its units."""
    kinds = sorted({kind for _, units in leases for kind in units})
    rows: list[str | int] = []
    for lease_id, units in leases:
        rows += (lease_id, *(units.get(kind, 0) for kind in kinds))
    return kinds, rows


def to_granted(reply: Sequence[Any]) -> list[SliceGrant]:
    """Read what `exchange.lua` says of each scope."""
    found = []
    for is_low, slots, *rest in reply:
        found.append(SliceGrant(bool(is_low), slots, list(zip(rest[::2], rest[1::2], strict=True))))
    return found
