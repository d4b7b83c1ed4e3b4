"""Keeps what a worker holds of an organization's limits, and what it has let pass of it.

Pure: it is told what Redis grants and says what Redis must be told; all that it knows of time is
its clock's seconds. README.md has the invariants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from gateway.limits.redis.outage import ScriptCall
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits

Clock = Callable[[], float]
"""Monotonic seconds."""
UnitsByKind = dict[str, int]
"""By the letter of the limit; slots are units of SLOTS."""

SliceMiss = Literal["quiet", "none", "changed", "expired", "low", "short"]
"""Why slices do not admit a request: few requests of its organization come; there is no slice of a
scope yet; it is of another limit; it was not exchanged in time; little is left of the scope; the
request wants more than the slice has."""

SLOTS = "s"
TTL_S = 2.0
"""How long Redis holds a slice after it has run the exchange that asked for it."""
VALID_S = 1.0
"""How long a worker uses it after it has sent that exchange."""
YOUNG_S = 1.0
"""A request that runs longer becomes a lease in Redis."""
REST_S = 1.0
"""How long a worker wants nothing of a scope in which little is left."""
IDLE_S = 0.5
"""After the last request all is given back."""
DECAY = 0.8
"""The worth of the last tick's demand in the next one."""
TICKS_AHEAD = 2
SPARE = 1.5
"""How much more than it wants a slice may keep before some is given back."""
MAX_SCOPES = 256
"""Scopes of an organization that have slices; requests in others take the exact path."""


class LimitShare(msgspec.Struct):
    """The part of one limit of a scope that a worker holds, in its units."""

    left: int = 0
    young: int = 0
    """Reserved by young requests."""
    done: int = 0
    """Used by requests that were young; Redis does not know yet."""
    told: int = 0
    """The part that Redis is being told of."""
    passed: int = 0
    """Let pass since the last exchange, by a slice or not."""
    demand: float = 0.0
    """By tick, of late."""
    largest: float = 0.0
    """The largest request of late."""
    others_full_us: int = 0
    """When the bucket is full, but for what this worker holds, by Redis' clock."""


class Slice:
    """The part of one scope that a worker holds. Its limits are those it was taken by."""

    def __init__(self, key: str, scope: ScopeLimits) -> None:
        self.key, self.scope = key, scope
        self.limits: dict[str, BucketLimit] = {each.letter: each for each in scope.buckets}
        self.held = {each.letter: LimitShare() for each in scope.buckets if each.limit}
        if scope.max_streams is not None:
            self.held[SLOTS] = LimitShare()
        self.num_young = 0
        self.is_in_redis = False
        self.reported: tuple[UnitsByKind, int] = {}, 0
        """The units it keeps and the number of its young requests, as Redis heard last."""
        self.valid_until = -math.inf
        self.rests_until = -math.inf

    def is_of(self, scope: ScopeLimits) -> bool:
        mine = self.scope
        if mine is scope:
            return True
        return mine.max_streams == scope.max_streams and mine.buckets == scope.buckets

    def miss(self, units: UnitsByKind, now: float) -> SliceMiss | None:
        """Return why a request does not fit in it. None: it fits."""
        if now < self.rests_until:
            return "low"
        if now >= self.valid_until:
            return "expired" if self.is_in_redis else "none"
        if len(self.held) < len(self.limits):
            return "low"  # a limit of nothing
        if all(units.get(kind, 1) <= held.left for kind, held in self.held.items()):
            return None
        return "short"

    def note(self, units: UnitsByKind) -> None:
        """Note what passes, or asks to."""
        for kind, held in self.held.items():
            wanted = units.get(kind, 1)
            held.passed += wanted
            if wanted > held.largest:
                held.largest = wanted

    def is_empty(self) -> bool:
        return not self.num_young and not any(
            held.left or held.young or held.done or held.told for held in self.held.values()
        )


class YoungRequest(msgspec.Struct):
    """A request that runs on slices alone."""

    lease_id: str
    units: UnitsByKind
    """Reserved, of each kind."""
    slices: tuple[Slice, ...]
    since: float


class EndedRequest(msgspec.Struct, frozen=True):
    """A request whose settlement Redis will hear of: its use, or what it used beyond its
    reservation. `call`: how Redis is told where no exchange can."""

    lease_id: str
    used: UnitsByKind
    call: ScriptCall


ToCall = Callable[[UnitsByKind], ScriptCall]
"""Makes the call of `settle.lua` that tells of a use."""


class SliceReport(msgspec.Struct, frozen=True, array_like=True):
    """One scope of an exchange, as `exchange.lua` reads it."""

    max_streams: int
    buckets: tuple[BucketLimit, ...]
    is_held: int
    keeps: UnitsByKind
    used: UnitsByKind
    wants: UnitsByKind
    num_young: int


class Exchange(msgspec.Struct, frozen=True):
    """Everything that Redis is told, and asked for, at once."""

    sent_at: float
    slices: list[Slice]
    reports: list[SliceReport]
    opened: list[YoungRequest]
    closed: list[EndedRequest]
    exceeded: list[EndedRequest]
    """Uses beyond reservations that the reports contain."""


class SliceGrant(msgspec.Struct, frozen=True):
    """Redis' answer for one scope."""

    is_low: bool
    slots: int
    buckets: Sequence[tuple[int, int]]
    """Units of each, in the scope's order, and when it is full but for this worker's slice."""


class OrgLedger:
    """The slices of one organization in one worker. Between `begin` and `complete` or `drop` there
    is one exchange; what happens meanwhile belongs to the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.slices: dict[str, Slice] = {}
        self.young: dict[str, YoungRequest] = {}
        self.closing: dict[str, EndedRequest] = {}
        """Leases in Redis that the next exchange closes."""
        self.exceeded: list[EndedRequest] = []
        """Uses beyond reservations, of which Redis has yet to hear."""
        self._is_tight = False
        """Less was granted than wanted: young requests become leases at once."""
        self.redis_ahead_us = 0.0
        """By how much Redis' clock was ahead of ours when it last answered, in microseconds."""

    # ---- requests

    def admit(
        self,
        lease_id: str,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        units: UnitsByKind,
    ) -> tuple[Slice, ...] | SliceMiss:
        """Reserve in all scopes, or in none and say why that is not for this ledger to decide."""
        known = self.young.get(lease_id)
        if known is not None:
            return known.slices
        now = self._clock()
        found = []
        for key, scope in zip(keys, scopes, strict=True):
            part = self.slices.get(key)
            if part is None:
                return "none"
            if not part.is_of(scope):
                return "changed"
            if (miss := part.miss(units, now)) is not None:
                return miss
            found.append(part)
        for part in found:
            part.num_young += 1
            part.note(units)
            for kind, held in part.held.items():
                amount = units.get(kind, 1)
                held.left -= amount
                held.young += amount
        taken = tuple(found)
        self.young[lease_id] = YoungRequest(lease_id, dict(units), taken, now)
        return taken

    def note(self, keys: Sequence[str], scopes: Sequence[ScopeLimits], units: UnitsByKind) -> None:
        """Note a request that the exact path decided: slices are sized by it, too."""
        for key, scope in zip(keys, scopes, strict=True):
            part = self.slices.get(key)
            if part is None:
                if len(self.slices) < MAX_SCOPES:
                    part = self.slices[key] = Slice(key, scope)
                    part.note(units)
            elif part.is_of(scope):
                part.note(units)
            # One of other limits is given back when nobody uses it any more.

    def extend(self, lease_id: str, units: UnitsByKind) -> bool:
        """Reserve more for a young request, if its slices have it."""
        young = self.young[lease_id]
        now = self._clock()
        more = {kind: amount for kind, amount in units.items() if amount}
        for part in young.slices:
            if now >= part.valid_until:
                return False
            if any(held.left < more.get(kind, 0) for kind, held in part.held.items()):
                return False
        for kind, amount in more.items():
            young.units[kind] += amount
            for part in young.slices:
                held = part.held.get(kind)
                if held is not None:
                    held.left -= amount
                    held.young += amount
                    held.passed += amount
        return True

    def settle(self, lease_id: str, used: UnitsByKind, to_call: ToCall) -> None:
        """End a young request. What it did not use is there for the next one."""
        young = self.young.pop(lease_id)
        beyond = {
            kind: used[kind] - amount for kind, amount in young.units.items() if used[kind] > amount
        }
        for part in young.slices:
            part.num_young -= 1
            for kind, held in part.held.items():
                amount, kept = young.units.get(kind, 1), used.get(kind, 0)
                held.young -= amount
                held.left += max(0, amount - kept)
                held.done += kept
        if beyond:
            self.exceeded.append(EndedRequest(lease_id, beyond, to_call(beyond)))

    def register(self, lease_ids: Iterable[str]) -> None:
        """Let young requests become leases with the next exchange."""
        for lease_id in lease_ids:
            if (young := self.young.get(lease_id)) is not None:
                young.since = -math.inf

    def close(self, lease_id: str, used: UnitsByKind, call: ScriptCall) -> None:
        """Settle a lease that is in Redis with the next exchange."""
        self.closing[lease_id] = EndedRequest(lease_id, used, call)

    # ---- the exchange

    def begin(self, *, returns: bool = False) -> Exchange:
        """Say what Redis is to be told and asked. `returns`: all is given back, and every young
        request becomes a lease."""
        now = self._clock()
        ripe = -math.inf if returns else now - (0.0 if self._is_tight else YOUNG_S)
        opened = [
            each
            for each in self.young.values()
            if returns or each.since <= ripe or any(now < part.rests_until for part in each.slices)
        ]
        for each in opened:
            del self.young[each.lease_id]
            for part in each.slices:
                part.num_young -= 1
                for kind, held in part.held.items():
                    amount = each.units.get(kind, 1)
                    held.young -= amount
                    held.told += amount
        told: list[Slice] = []
        reports: list[SliceReport] = []
        of_leases = {part.key for each in opened for part in each.slices}
        for part in list(self.slices.values()):
            report = self._report(part, now, returns=returns)
            if part.key in of_leases or self._is_news(part, report, now):
                part.reported = report.keeps, report.num_young
                told.append(part)
                reports.append(report)
            elif not part.is_in_redis and part.is_empty() and self._is_unused(part):
                del self.slices[part.key]
        closed, exceeded = list(self.closing.values()), self.exceeded
        self.closing, self.exceeded = {}, []
        return Exchange(now, told, reports, opened, closed, exceeded)

    def _report(self, part: Slice, now: float, *, returns: bool) -> SliceReport:
        keeps: UnitsByKind = {}
        used: UnitsByKind = {}
        wants: UnitsByKind = {}
        rests = returns or now < part.rests_until
        for kind, held in part.held.items():
            held.demand = max(float(held.passed), held.demand * DECAY)
            held.largest *= 1.0 if held.passed else DECAY
            held.passed = 0
            wanted = 0
            if not rests and held.demand >= 0.5:
                wanted = math.ceil(max(TICKS_AHEAD * held.demand, held.largest))
            held.left = min(held.left, math.ceil(SPARE * wanted))
            if held.left + held.young:
                keeps[kind] = held.left + held.young
            if wanted > held.left:
                wants[kind] = wanted - held.left
            if held.done:
                used[kind] = held.done
            held.told += held.done
            held.done = 0
        used.pop(SLOTS, None)
        scope = part.scope
        return SliceReport(
            -1 if scope.max_streams is None else scope.max_streams,
            scope.buckets,
            int(part.is_in_redis),
            keeps,
            used,
            wants,
            part.num_young,
        )

    @staticmethod
    def _is_news(part: Slice, report: SliceReport, now: float) -> bool:
        if report.used or report.wants or any(held.told for held in part.held.values()):
            return True
        if part.reported != (report.keeps, report.num_young):
            return True
        return part.is_in_redis and part.valid_until - now < VALID_S / 2

    def complete(self, done: Exchange, granted: Sequence[SliceGrant], now_us: int) -> bool:
        """Take over what Redis has granted. `now_us`: its clock. Tells whether a scope is low, so
        that Redis wants back what is left of it, and leases for what runs on it."""
        now = self._clock()
        self.redis_ahead_us = now_us - now * 1_000_000
        self._is_tight, wanted_back = False, False
        for part, report, found in zip(done.slices, done.reports, granted, strict=True):
            part.valid_until = done.sent_at + VALID_S
            amounts = {SLOTS: found.slots} if SLOTS in part.held else {}
            for limit, (units, full_us) in zip(part.scope.buckets, found.buckets, strict=True):
                if (bucket := part.held.get(limit.letter)) is not None:
                    amounts[limit.letter] = units
                    bucket.others_full_us = full_us
            for kind, held in part.held.items():
                held.left += amounts[kind]
                held.told = 0
                self._is_tight |= amounts[kind] < report.wants.get(kind, 0) and not found.is_low
            part.is_in_redis = bool(
                report.num_young
                or any(report.keeps.get(kind, 0) + amounts[kind] for kind in part.held)
            )
            if found.is_low:
                part.rests_until = now + REST_S
                wanted_back |= any(held.left or held.young for held in part.held.values())
        return wanted_back

    @staticmethod
    def _is_unused(part: Slice) -> bool:
        return all(held.demand < 0.5 and not held.passed for held in part.held.values())

    def is_empty(self) -> bool:
        return (
            not self.young
            and not self.closing
            and not self.exceeded
            and not any(part.is_in_redis or not part.is_empty() for part in self.slices.values())
        )

    def full_moments(
        self, scopes: Sequence[ScopeLimits], slices: Sequence[Slice]
    ) -> tuple[list[int], int]:
        """Return, as `outcomes.rate_state` reads it, when each bucket is full again, and the time;
        both by Redis' clock."""
        now_us = round(self._clock() * 1_000_000 + self.redis_ahead_us)
        found = []
        for scope, part in zip(scopes, slices, strict=True):
            found.append(0)
            for limit in scope.buckets:
                held = part.held[limit.letter]
                mine = held.young + held.done + held.told
                cost_us = -(-mine * limit.window_us // limit.limit)
                found.append(max(now_us, held.others_full_us) + cost_us)
        return found, now_us
