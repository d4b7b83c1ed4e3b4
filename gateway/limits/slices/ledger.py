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
from gateway.limits.redis.scope_limits import BucketLimit, CounterCap, ScopeLimits

Clock = Callable[[], float]
"""Monotonic seconds."""
UnitsByKind = dict[str, int]
"""By the letter of the limit; slots are units of SLOTS."""

SliceMiss = Literal["quiet", "none", "changed", "expired", "low", "short"]
"""Why slices do not admit a request: few requests of its organization come; there is no slice of a
scope yet; it is of another limit; it was not exchanged in time; little is left of the scope; the
request wants more than the slice has."""

SLOTS = "s"
MONEY = "m"
"""The kind of what is held of a counter, in nano-USD."""
TTL_S = 2.0
"""How long Redis holds a slice after it has run the exchange that asked for it."""
VALID_S = 1.0
"""How long a worker uses it after it has sent that exchange."""
YOUNG_S = 2.0
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
    """The part that a worker holds of what has this key in Redis. `held`: by kind."""

    def __init__(self, key: str, held: dict[str, LimitShare]) -> None:
        self.key, self.held = key, held
        self.limits: dict[str, BucketLimit] = {}
        self.num_young = 0
        self.is_in_redis = False
        self.reported: tuple[UnitsByKind, int] = {}, 0
        """The units it keeps and the number of its young requests, as Redis heard last."""
        self.valid_until = -math.inf
        self.rests_until = -math.inf

    def is_usable(self, now: float) -> bool:
        return self.rests_until <= now < self.valid_until

    def miss(self, units: UnitsByKind, now: float) -> SliceMiss | None:
        """Return why a request does not fit in it. None: it fits."""
        if now < self.rests_until:
            return "low"
        if now >= self.valid_until:
            return "expired" if self.is_in_redis else "none"
        if len(self.held) < len(self.limits):
            return "low"  # a limit of nothing
        for kind, held in self.held.items():
            if units.get(kind, 1) > held.left:
                return "short"
        return None

    def note(self, units: UnitsByKind) -> None:
        """Note what passes, or asks to."""
        for kind, held in self.held.items():
            wanted = units.get(kind, 1)
            held.passed += wanted
            if wanted > held.largest:
                held.largest = wanted

    def take(self, units: UnitsByKind) -> None:
        """Take what a young request reserves, which fits, and note it as `note` does."""
        self.num_young += 1
        for kind, held in self.held.items():
            wanted = units.get(kind, 1)
            held.left -= wanted
            held.young += wanted
            held.passed += wanted
            if wanted > held.largest:
                held.largest = wanted

    def put_back(self, units: UnitsByKind, used: UnitsByKind) -> None:
        """Put back what a young request has reserved, but what it used."""
        self.num_young -= 1
        for kind, held in self.held.items():
            amount, kept = units.get(kind, 1), used.get(kind, 0)
            held.young -= amount
            if amount > kept:
                held.left += amount - kept
            held.done += kept

    def is_empty(self) -> bool:
        return not self.num_young and not any(
            held.left or held.young or held.done or held.told for held in self.held.values()
        )


class ScopeSlice(Slice):
    """The part of one scope. Its limits are those it was taken by."""

    def __init__(self, key: str, scope: ScopeLimits) -> None:
        held = {each.letter: LimitShare() for each in scope.buckets if each.limit}
        if scope.max_streams is not None:
            held[SLOTS] = LimitShare()
        super().__init__(key, held)
        self.scope = scope
        self.limits = {each.letter: each for each in scope.buckets}

    def is_of(self, scope: ScopeLimits) -> bool:
        mine = self.scope
        if mine is scope:
            return True
        return mine.max_streams == scope.max_streams and mine.buckets == scope.buckets


class MoneySlice(Slice):
    """The part of what is left under one hard cap."""

    def __init__(self, cap: CounterCap) -> None:
        super().__init__(cap.key, {MONEY: LimitShare()})
        self.cap = cap


class YoungRequest(msgspec.Struct):
    """A request that runs on slices alone."""

    lease_id: str
    units: UnitsByKind
    """Reserved, of each kind."""
    scopes: tuple[ScopeSlice, ...]
    money: tuple[MoneySlice, ...]
    since: float

    @property
    def slices(self) -> tuple[Slice, ...]:
        return (*self.scopes, *self.money)


class EndedRequest(msgspec.Struct, frozen=True):
    """A request whose settlement Redis will hear of: its use, or what it used beyond its
    reservation. `call`: how Redis is told where no exchange can."""

    lease_id: str
    used: UnitsByKind
    call: ScriptCall


ToCall = Callable[[UnitsByKind], ScriptCall]
"""Makes the call of `settle.lua` that tells of a use."""


class SpentRequest(msgspec.Struct, frozen=True):
    """A request that ran on slices of money and has ended. `call`: how Redis is told where no
    exchange can."""

    lease_id: str
    nano: int
    slices: tuple[MoneySlice, ...]
    call: ScriptCall


class SliceReport(msgspec.Struct, frozen=True, array_like=True):
    """One scope of an exchange, as `exchange.lua` reads it."""

    max_streams: int
    buckets: tuple[BucketLimit, ...]
    is_held: int
    keeps: UnitsByKind
    used: UnitsByKind
    wants: UnitsByKind
    num_young: int


class MoneyReport(msgspec.Struct, frozen=True, array_like=True):
    """One counter of an exchange, as `exchange.lua` reads it; amounts in nano-USD."""

    amount: int
    is_funded: int
    is_held: int
    left: int
    young: int
    wants: int
    share: int


class Exchange(msgspec.Struct, frozen=True):
    """Everything that Redis is told, and asked for, at once."""

    sent_at: float
    slices: list[ScopeSlice]
    reports: list[SliceReport]
    money: list[MoneySlice]
    money_reports: list[MoneyReport]
    opened: list[YoungRequest]
    closed: list[EndedRequest]
    exceeded: list[EndedRequest]
    """Uses beyond reservations that the reports contain."""
    spent: list[SpentRequest]

    @property
    def is_needless(self) -> bool:
        return not (self.reports or self.money_reports or self.opened or self.closed)


class SliceGrant(msgspec.Struct, frozen=True):
    """Redis' answer for one scope."""

    is_low: bool
    slots: int
    buckets: Sequence[tuple[int, int]]
    """Units of each, in the scope's order, and when it is full but for this worker's slice."""


class MoneyGrant(msgspec.Struct, frozen=True, array_like=True):
    """Redis' answer for one counter."""

    is_low: int
    nano: int
    left_nano: int
    """Under its cap; -1: there is no counter."""
    is_short: int
    """It is time to lease more of the balance."""


class OrgLedger:
    """The slices of one organization in one worker. Between `begin` and `complete` or `drop` there
    is one exchange; what happens meanwhile belongs to the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.slices: dict[str, ScopeSlice] = {}
        self.money: dict[str, MoneySlice] = {}
        """By the key of the counter."""
        self.young: dict[str, YoungRequest] = {}
        self.closing: dict[str, EndedRequest] = {}
        """Leases in Redis that the next exchange closes."""
        self.exceeded: list[EndedRequest] = []
        """Uses beyond reservations, of which Redis has yet to hear."""
        self.spent: list[SpentRequest] = []
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
        caps: Sequence[CounterCap] = (),
    ) -> tuple[ScopeSlice, ...] | SliceMiss:
        """Reserve in all scopes and under all caps, or in none and say why that is not for this
        ledger to decide. Returns the slices of the scopes."""
        known = self.young.get(lease_id)
        if known is not None:
            return known.scopes
        now = self._clock()
        found: list[ScopeSlice] = []
        for key, scope in zip(keys, scopes, strict=True):
            part = self.slices.get(key)
            if part is None:
                return "none"
            if not part.is_of(scope):
                return "changed"
            if (miss := part.miss(units, now)) is not None:
                return miss
            found.append(part)
        paying: list[MoneySlice] = []
        for cap in caps:
            purse = self.money.get(cap.key)
            if purse is None:
                return "none"
            if purse.cap != cap:
                return "changed"
            if (miss := purse.miss(units, now)) is not None:
                return miss
            paying.append(purse)
        for each in (*found, *paying):
            each.take(units)
        taken = tuple(found)
        self.young[lease_id] = YoungRequest(lease_id, dict(units), taken, tuple(paying), now)
        return taken

    def note(
        self,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        units: UnitsByKind,
        caps: Sequence[CounterCap] = (),
    ) -> None:
        """Note a request that the exact path decided: slices are sized by it, too."""
        for key, scope in zip(keys, scopes, strict=True):
            part = self.slices.get(key)
            if part is None:
                if len(self.slices) < MAX_SCOPES:
                    part = self.slices[key] = ScopeSlice(key, scope)
                    part.note(units)
            elif part.is_of(scope):
                part.note(units)
            # One of other limits is given back when nobody uses it any more.
        for cap in caps:
            purse = self.money.get(cap.key)
            if purse is None and len(self.money) < MAX_SCOPES:
                purse = self.money[cap.key] = MoneySlice(cap)
            if purse is not None and purse.cap == cap:
                purse.note(units)

    def extend(self, lease_id: str, units: UnitsByKind) -> bool:
        """Reserve more for a young request, if its slices have it."""
        young = self.young[lease_id]
        now = self._clock()
        more = {kind: amount for kind, amount in units.items() if amount}
        for part in young.scopes:
            if now >= part.valid_until:
                return False
            if any(held.left < more.get(kind, 0) for kind, held in part.held.items()):
                return False
        for kind, amount in more.items():
            young.units[kind] += amount
            for part in young.scopes:
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
            kind: used[kind] - amount
            for kind, amount in young.units.items()
            if used[kind] > amount and kind != MONEY
        }
        for part in young.slices:
            part.put_back(young.units, used)
        if young.money:
            call = to_call(used)
            paid = {**young.units, MONEY: 0}
            told = ScriptCall(call.keys, (*call.asked, paid))
            self.spent.append(SpentRequest(lease_id, used[MONEY], young.money, told))
        elif beyond:
            self.exceeded.append(EndedRequest(lease_id, beyond, to_call(beyond)))

    def are_usable(self, counters: Iterable[str]) -> bool:
        """Tell whether all of these have slices here, and so are not near their caps."""
        now = self._clock()
        found = map(self.money.get, counters)
        return all(each is not None and each.is_usable(now) for each in found)

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
        closed, exceeded, spent = list(self.closing.values()), self.exceeded, self.spent
        self.closing, self.exceeded, self.spent = {}, [], []
        needed = {part.key for each in opened for part in each.slices}
        needed.update(part.key for each in spent for part in each.slices)
        done = Exchange(now, [], [], [], [], opened, closed, exceeded, spent)
        for part in list(self.slices.values()):
            if (wanted := self._wanted(part, now, needed, returns=returns)) is not None:
                done.slices.append(part)
                done.reports.append(to_report(part, *wanted))
            elif self._is_over(part):
                del self.slices[part.key]
        for purse in list(self.money.values()):
            if (wanted := self._wanted(purse, now, needed, returns=returns)) is not None:
                done.money.append(purse)
                done.money_reports.append(to_money_report(purse, *wanted))
            elif self._is_over(purse):
                del self.money[purse.key]
        return done

    def _wanted(
        self, part: Slice, now: float, needed: set[str], *, returns: bool
    ) -> tuple[UnitsByKind, UnitsByKind, UnitsByKind] | None:
        """Return what a slice keeps, what was used of it and what it wants beside, by kind. None:
        Redis needs not hear of it. `needed`: the keys of those of which it has to."""
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
        is_news = bool(
            part.key in needed
            or used
            or wants
            or any(held.told for held in part.held.values())
            or part.reported != (keeps, part.num_young)
            or (part.is_in_redis and part.valid_until - now < VALID_S / 2)
        )
        if not is_news:
            return None
        part.reported = keeps, part.num_young
        return keeps, used, wants

    def complete(
        self,
        done: Exchange,
        granted: Sequence[SliceGrant],
        money: Sequence[MoneyGrant],
        now_us: int,
    ) -> bool:
        """Take over what Redis has granted. `now_us`: its clock. Tells whether a scope or a cap is
        low, so that Redis wants back what is left of it, and leases for what runs on it."""
        now = self._clock()
        self.redis_ahead_us = now_us - now * 1_000_000
        self._is_tight, wanted_back = False, False
        for part, report, found in zip(done.slices, done.reports, granted, strict=True):
            amounts = {SLOTS: found.slots} if SLOTS in part.held else {}
            for limit, (units, full_us) in zip(part.scope.buckets, found.buckets, strict=True):
                if (bucket := part.held.get(limit.letter)) is not None:
                    amounts[limit.letter] = units
                    bucket.others_full_us = full_us
            is_short = any(amounts[kind] < report.wants.get(kind, 0) for kind in part.held)
            self._is_tight |= is_short and not found.is_low
            wanted_back |= self._take_over(part, amounts, done.sent_at, is_low=found.is_low)
        for purse, nano in zip(done.money, money, strict=True):
            amounts = {MONEY: nano.nano}
            wanted_back |= self._take_over(purse, amounts, done.sent_at, is_low=bool(nano.is_low))
        return wanted_back

    def _take_over(
        self, part: Slice, amounts: UnitsByKind, sent_at: float, *, is_low: bool
    ) -> bool:
        """Take over what was granted. Tells whether Redis wants back what is left."""
        keeps, num_young = part.reported
        part.valid_until = sent_at + VALID_S
        for kind, held in part.held.items():
            held.left += amounts[kind]
            held.told = 0
        part.is_in_redis = bool(
            num_young or any(keeps.get(kind, 0) + amounts[kind] for kind in part.held)
        )
        if not is_low:
            return False
        part.rests_until = self._clock() + REST_S
        return any(held.left or held.young for held in part.held.values())

    @staticmethod
    def _is_over(part: Slice) -> bool:
        """Tell whether nothing is held of it, and nobody asks for it any more."""
        return (
            not part.is_in_redis
            and part.is_empty()
            and all(held.demand < 0.5 and not held.passed for held in part.held.values())
        )

    def is_empty(self) -> bool:
        return (
            not self.young
            and not self.closing
            and not self.exceeded
            and not self.spent
            and not any(
                part.is_in_redis or not part.is_empty()
                for part in (*self.slices.values(), *self.money.values())
            )
        )

    def full_moments(
        self, scopes: Sequence[ScopeLimits], slices: Sequence[ScopeSlice]
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


def to_report(
    part: ScopeSlice, keeps: UnitsByKind, used: UnitsByKind, wants: UnitsByKind
) -> SliceReport:
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


def to_money_report(
    part: MoneySlice, keeps: UnitsByKind, used: UnitsByKind, wants: UnitsByKind
) -> MoneyReport:
    """Return the report of a counter; what was used of it is told by request."""
    held, cap = part.held[MONEY], part.cap
    return MoneyReport(
        cap.amount_nano,
        int(cap.is_funded),
        int(part.is_in_redis),
        held.left,
        held.young,
        wants.get(MONEY, 0),
        cap.share,
    )
