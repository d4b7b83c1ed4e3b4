"""Reads how much of its limits is used and held now, for people: in one script, which changes
nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.limits.outcomes import rate_window, to_script
from gateway.limits.redis.keys import org_keys, scope_keys
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits
from gateway.limits.redis.scripts import Scripts
from gateway.principal import PLAN_LIMITS, PlanLimit

MAX_LEASES = 256
"""Open requests whose reservations are added up; of more, the rest counts as used."""
MAX_SCOPES = 64
BY_LETTER = {limit.letter: limit for limit in PLAN_LIMITS}
(STREAMS,) = (limit for limit in PLAN_LIMITS if limit.counts == "streams")


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one limit of one owner, in the limit's units."""

    scope: ScopeLimits
    limit: PlanLimit
    amount: int
    """The limit, per its window."""
    at_once: int
    """The most that may come at once: what a full bucket holds."""
    used: int
    """The part that has not refilled yet; more than fits at once is debt."""
    held: int
    """The part that running requests have reserved and not used yet."""
    left: int
    full_in_s: float | None
    """Seconds until all of it is there again. None: as requests end."""


class LiveUse(msgspec.Struct, frozen=True, kw_only=True):
    limits: Sequence[LimitUse]
    num_running: int
    """The open requests of the organization that any limit binds."""


async def read_use(scripts: Scripts, org_id: str, scopes: Sequence[ScopeLimits]) -> LiveUse:
    """Read the use of the first MAX_SCOPES. Raises: LimiterUnavailable."""
    scopes = scopes[:MAX_SCOPES]
    keys = [*org_keys(org_id), *scope_keys(org_id, scopes)]
    asked = ([to_script(scope) for scope in scopes], MAX_LEASES)
    now_us, num_running, *rest = await scripts.call("look", keys, asked)
    found, values = list[LimitUse](), iter(rest)
    for scope in scopes:
        num_open = next(values)
        for bucket in scope.buckets:
            found.append(use_of(scope, bucket, next(values), next(values), now_us))
        if scope.max_streams is not None:
            most = scope.max_streams
            found.append(
                LimitUse(
                    scope=scope,
                    limit=STREAMS,
                    amount=most,
                    at_once=most,
                    used=num_open,
                    held=0,
                    left=max(0, most - num_open),
                    full_in_s=None,
                )
            )
    return LiveUse(limits=found, num_running=num_running)


def use_of(
    scope: ScopeLimits, bucket: BucketLimit, full_at_us: int, held_us: int, now_us: int
) -> LimitUse:
    """`full_at_us`: -1 where nobody knows, which reads as full. `held_us`: microseconds of
    refill."""
    window = rate_window(bucket, full_at_us, now_us)
    held = held_us * bucket.limit // bucket.window_us
    taken = max(0, full_at_us - now_us) * bucket.limit // bucket.window_us
    held = min(held, taken)
    return LimitUse(
        scope=scope,
        limit=BY_LETTER[bucket.letter],
        amount=bucket.limit,
        at_once=bucket.burst if bucket.limit else 0,
        used=taken - held,
        held=held,
        left=window.remaining,
        full_in_s=window.reset_s,
    )
