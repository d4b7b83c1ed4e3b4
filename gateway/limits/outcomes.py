"""Holds what the limiter answers, and what a request takes from its scopes.

Pure data, and the arithmetic of buckets as clients see them; the same stands in `ledger.lua`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec

from engine.protocol import Lane
from gateway.limits.redis.keys import scope_keys
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits, ScopeName
from gateway.limits.spending import SpendReservation, counter_keys
from gateway.principal import MINUTE_US, PLAN_LIMITS, UNLIMITED, CapPeriod, Plan, Principal

MAX_PLANS = 4096
"""Different ones at a time, of which the buckets are remembered."""

BURST_DIVISOR = 6
"""A bucket holds a sixth of its limit per minute: ten seconds of refill."""
MONEY = "money"
"""The kind of a refusal by a cap on spending; the scripts' name of it is "m", and no bucket's."""
BUCKETS = tuple(limit for limit in PLAN_LIMITS if limit.window_us)
COUNTED = {limit.letter: limit.counts for limit in BUCKETS}
KINDS = {limit.letter: limit.kind for limit in PLAN_LIMITS}
SHOWN = {limit.letter: limit.kind for limit in BUCKETS if limit.window_us == MINUTE_US}
"""The kinds that headers tell of."""
OF_TOKENS = frozenset(letter for letter, counts in COUNTED.items() if counts == "tokens")
OF_OUTPUT = frozenset(letter for letter, counts in COUNTED.items() if counts == "output_tokens")
WRITTEN = OF_TOKENS | OF_OUTPUT


def burst(limit: int) -> int:
    """Return the units that a full bucket holds; at least one, so that small limits let something
    pass."""
    return max(1, limit // BURST_DIVISOR)


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """The units that a request reserves, or has used so far."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_nano: int = 0
    """The cost of the use, if spending is capped."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def counted(self, *, requests: int = 0) -> dict[str, int]:
        """Return all that a `PlanLimit` may count."""
        return {
            "tokens": self.tokens,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "requests": requests,
        }

    def by_letter(self, *, requests: int = 0) -> dict[str, int]:
        """Return the units of each bucket, as the scripts read them. Which of a batch's tokens
        count is the scope's matter: a bucket that was not reserved from is left alone."""
        counted = self.counted(requests=requests)
        units = {letter: counted[counts] for letter, counts in COUNTED.items()}
        units["m"] = self.cost_nano
        return units


class RateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one bucket, as of the verdict."""

    limit: int
    """The limit per minute."""
    remaining: int
    """How much would be admitted now; a full bucket holds `burst(limit)`."""
    reset_s: float
    """Seconds until the bucket is full."""


RateState = Mapping[str, RateWindow]
"""The tightest scope's window, by each kind that headers tell of."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The request may run. Without `scopes` and `spending` nothing limits it and there is no
    lease."""

    lease_id: str
    org_id: str
    key_id: str
    model: str
    reserved: Units
    max_output_tokens: int
    """The most it may write, which may be less than was asked for: what is left of a cap."""
    scopes: tuple[ScopeLimits, ...]
    state: RateState
    spending: SpendReservation | None = None
    is_local: bool = False
    """Redis was away, and knows nothing of it."""
    is_of_slices: bool = False
    """It was taken from slices that this process holds."""

    @property
    def has_lease(self) -> bool:
        return bool(self.scopes) or self.spending is not None

    @property
    def limits_tokens(self) -> bool:
        """Tell whether what it writes beyond its reservation must be asked for."""
        return not self.is_local and any(
            bucket.letter in WRITTEN for scope in self.scopes for bucket in scope.buckets
        )


def holds_of(admission: Admission) -> list[tuple[str, int]]:
    """Return the counters, and what its lease holds of each: for one that must be opened again."""
    spending = admission.spending
    if spending is None:
        return []
    hold = min(spending.hold_nano, spending.most_nano(admission.max_output_tokens))
    return [(key, hold) for key in counter_keys(admission.org_id, spending.caps)]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The request may not run, and nothing was consumed. `scope` and `kind` are those it must wait
    for longest."""

    scope: ScopeName
    kind: str
    """The kind of its `PlanLimit`, or MONEY."""
    limit: int
    retry_after_s: float | None
    """None: it can never fit."""
    state: RateState
    period: CapPeriod | None = None
    """The period of a spending cap; `limit` is then in nano-USD."""
    paid_for: str | None = None
    """Not a cap is in the way but what was paid in advance for this model."""
    left_nano: int = 0
    """The part of the cap that is neither spent nor reserved."""
    ends_at: datetime | None = None
    """The period of the cap."""
    less_may_fit: bool = False
    """If fewer tokens are asked for."""


def overspent(
    spending: SpendReservation, place: int, amount_nano: int, left: int, state: RateState
) -> Refusal:
    """Refuse a request that a cap has no room for. `amount_nano`: of the cap, by now."""
    cap = spending.caps[place - 1]
    return Refusal(
        scope=cap.counter.scope,
        kind=MONEY,
        limit=amount_nano,
        retry_after_s=None,
        state=state,
        period=cap.counter.period,
        paid_for=spending.model if cap.is_funded and amount_nano < cap.amount_nano else None,
        left_nano=max(0, left),
        ends_at=cap.counter.end,
        less_may_fit=spending.most_nano(max(1, spending.min_output_tokens)) <= left,
    )


class Settlement(Enum):
    """The outcome of a settle; numbers as in `settle.lua`."""

    REPLAYED = 0
    """It was settled before; nothing was done."""
    SETTLED = 1
    LATE = 2
    """The lease had expired and given back what it was not known to have used; the rest of what it
    did use became debt."""
    UNKNOWN = 3
    """No record, and no scopes to debit."""
    UNLIMITED = 4
    """There was no lease to settle."""
    DEFERRED = 5
    """Redis is away; it is settled when it is back."""
    FAILED = 6
    """A script failed on the organization's data in Redis; the lease is left to expire."""


def scopes_of(principal: Principal, model: str, lane: Lane) -> tuple[ScopeLimits, ...]:
    """The owners of `principal` that have any limit on `model` in `lane`, the narrowest first.
    Nothing is made for who has none."""
    scopes: list[ScopeLimits] = []
    if principal.key_model_plans and (plan := principal.key_model_plans.get(model)):
        add_limits(scopes, "key_model", f"{principal.key_id}/{model}", plan, lane)
    if principal.key_plan is not UNLIMITED:
        add_limits(scopes, "key", principal.key_id, principal.key_plan, lane)
    if principal.model_plans and (plan := principal.model_plans.get(model)):
        add_limits(scopes, "model", f"{principal.project_id}/{model}", plan, lane)
    if principal.client_plan is not UNLIMITED:
        add_limits(scopes, "client", principal.client_id or "", principal.client_plan, lane)
    if principal.project_plan is not UNLIMITED:
        add_limits(scopes, "project", principal.project_id, principal.project_plan, lane)
    if principal.org_plan is not UNLIMITED:
        add_limits(scopes, "org", principal.org_id, principal.org_plan, lane)
    return tuple(scopes)


def without_streams(scopes: tuple[ScopeLimits, ...]) -> tuple[ScopeLimits, ...]:
    """Return what limits a request that is no stream."""
    return tuple(
        msgspec.structs.replace(scope, max_streams=None) for scope in scopes if scope.buckets
    )


def add_limits(
    scopes: list[ScopeLimits], scope: ScopeName, owner_id: str, plan: Plan, lane: Lane
) -> None:
    """Add what a plan limits of an owner in a lane, if it limits anything."""
    buckets, streams = buckets_of(plan, lane), plan.max_concurrent_streams
    if buckets or streams is not None:
        limits = ScopeLimits(scope=scope, owner_id=owner_id, buckets=buckets, max_streams=streams)
        scopes.append(limits)


@lru_cache(MAX_PLANS)
def buckets_of(plan: Plan, lane: Lane) -> tuple[BucketLimit, ...]:
    """Return the buckets that hold in a lane. One of a day may be used at once: its burst is all of
    it."""
    found: list[BucketLimit] = []
    for each in BUCKETS:
        limit: int | None = getattr(plan, each.name)
        if limit is not None and each.lane in (None, lane):
            most = burst(limit) if each.window_us == MINUTE_US and limit else limit
            found.append(BucketLimit(each.letter, limit, most, each.window_us))
    return tuple(found)


def rate_window(limit: BucketLimit, full_at_us: int, now_us: int) -> RateWindow:
    """A bucket that is full again at `full_at_us`; `remaining` is exactly what `admit.lua` lets
    pass.
    """
    deficit_us = max(0, full_at_us - now_us)
    remaining = 0
    if limit.limit > 0:
        full_us = -(-limit.burst * limit.window_us // limit.limit)
        remaining = max(0, (full_us - deficit_us) * limit.limit // limit.window_us)
    return RateWindow(limit=limit.limit, remaining=remaining, reset_s=deficit_us / 1_000_000)


def rate_state(scopes: Sequence[ScopeLimits], reply: list[int], now_us: int) -> RateState:
    """Return what clients are told of their limits: of each kind the window that lets least pass
    now. `reply`: for each scope its open leases, and the full moment of each of its buckets."""
    state: dict[str, RateWindow] = {}
    moments = iter(reply)
    for scope in scopes:
        next(moments)
        for bucket in scope.buckets:
            full_at_us = next(moments)
            if (kind := SHOWN.get(bucket.letter)) is None:
                continue
            window, known = rate_window(bucket, full_at_us, now_us), state.get(kind)
            if known is None or tightness(window) < tightness(known):
                state[kind] = window
    return state


def tightness(window: RateWindow) -> tuple[int, int]:
    return window.remaining, window.limit


def refused(by: ScopeLimits, letter: str, wait_s: float | None, state: RateState) -> Refusal:
    limit = by.max_streams
    for bucket in by.buckets:
        if bucket.letter == letter:
            limit = bucket.limit
    assert limit is not None
    return Refusal(
        scope=by.scope, kind=KINDS[letter], limit=limit, retry_after_s=wait_s, state=state
    )


MAX_TOKENS = 100_000_000
"""A request counts for at most this many tokens, which keeps Lua's arithmetic exact (10^8 x 60 s in
microseconds < 2^53). A larger one, which no window holds, counts as this many."""


def reservation(scopes: Sequence[ScopeLimits], input_tokens: int, output_tokens: int) -> Units:
    """Return what a request takes from its scopes, bounded. What is expected to be written never
    makes it too large for its limits: only its input does."""
    for scope in scopes:
        for bucket in scope.buckets:
            if bucket.letter in OF_TOKENS:
                output_tokens = min(output_tokens, bucket.limit - input_tokens)
            elif bucket.letter in OF_OUTPUT:
                output_tokens = min(output_tokens, bucket.limit)
    return bounded(Units(input_tokens=input_tokens, output_tokens=max(0, output_tokens)))


def bounded(used: Units) -> Units:
    """Return `used` with at most MAX_TOKENS."""
    if used.tokens <= MAX_TOKENS:
        return used
    input_tokens = min(used.input_tokens, MAX_TOKENS)
    return Units(
        input_tokens=input_tokens,
        output_tokens=MAX_TOKENS - input_tokens,
        cost_nano=used.cost_nano,
    )


def to_script(scope: ScopeLimits) -> tuple[int, Sequence[Any]]:
    """Return a scope as the scripts read it."""
    return (-1 if scope.max_streams is None else scope.max_streams, scope.buckets)


def to_charges(admission: Admission) -> list[tuple[str, list[BucketLimit]]]:
    """Return the charges from which the script opens a lease again."""
    keys = scope_keys(admission.org_id, admission.scopes)
    return [
        (key, [bucket for bucket in scope.buckets if bucket.limit])
        for key, scope in zip(keys, admission.scopes, strict=True)
    ]
