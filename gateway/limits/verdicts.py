"""What the limiter answers. Pure data and the arithmetic of buckets as clients see them.

Above: `limiter`, `headers`, `inference`, `errors`. Below: `principal`. The same arithmetic stands
in `ledger.lua`.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from gateway.principal import UNLIMITED, Plan, Principal

BURST_DIVISOR = 6
"""A bucket holds a sixth of its limit per minute: ten seconds of refill."""
MINUTE_US = 60_000_000

ScopeName = Literal["key", "model", "project", "org"]
"""`model`: what a project may use of one."""
LimitKind = Literal["tokens", "requests", "streams"]
KINDS: tuple[LimitKind, ...] = ("tokens", "requests", "streams")


def burst(limit: int) -> int:
    """Units a full bucket holds; at least one, so that small limits let something pass."""
    return max(1, limit // BURST_DIVISOR)


class RateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket, as of the verdict."""

    limit: int
    """Per minute."""
    remaining: int
    """What would pass at once; a full bucket holds `burst(limit)`."""
    reset_s: float
    """Until the bucket is full."""


class RateState(msgspec.Struct, frozen=True, kw_only=True):
    """The tightest scope of each kind, for response headers; None: no scope has such a limit."""

    requests: RateWindow | None = None
    tokens: RateWindow | None = None


class ScopeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """One owner that limits a request."""

    scope: ScopeName
    owner_id: str
    plan: Plan


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The request may run. Without `scopes` nothing limits it and there is no lease."""

    lease_id: str
    org_id: str
    key_id: str
    model: str
    reserved: int
    """Tokens."""
    scopes: tuple[ScopeLimits, ...]
    state: RateState


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The request may not run, and nothing was consumed. `scope` and `kind` are those it must wait
    for longest."""

    scope: ScopeName
    kind: LimitKind
    limit: int
    retry_after_s: float | None
    """None: it can never fit."""
    state: RateState


class Settlement(Enum):
    """What a settle did; numbers as in `settle.lua`."""

    REPLAYED = 0
    """It was settled before; nothing was done."""
    SETTLED = 1
    LATE = 2
    """The lease had expired and given back what it reserved; what was used became debt."""
    UNKNOWN = 3
    """No record, and no scopes to debit."""
    UNLIMITED = 4
    """There was no lease to settle."""


def scopes_of(principal: Principal, model: str) -> tuple[ScopeLimits, ...]:
    """The owners of `principal` that have any limit on `model`, the narrowest first."""
    owners: tuple[tuple[ScopeName, str, Plan], ...] = (
        ("key", principal.key_id, principal.key_plan),
        ("model", f"{principal.project_id}/{model}", principal.model_plans.get(model, UNLIMITED)),
        ("project", principal.project_id, principal.project_plan),
        ("org", principal.org_id, principal.org_plan),
    )
    return tuple(
        ScopeLimits(scope=scope, owner_id=owner_id, plan=plan)
        for scope, owner_id, plan in owners
        if (plan.tokens_per_minute, plan.requests_per_minute, plan.max_concurrent_streams)
        != (None, None, None)
    )


def rate_window(limit: int, full_at_us: int, now_us: int) -> RateWindow:
    """A bucket that is full again at `full_at_us`; `remaining` is exactly what `admit.lua` lets
    pass.
    """
    deficit_us = max(0, full_at_us - now_us)
    remaining = 0
    if limit > 0:
        full_us = -(-burst(limit) * MINUTE_US // limit)
        remaining = max(0, (full_us - deficit_us) * limit // MINUTE_US)
    return RateWindow(limit=limit, remaining=remaining, reset_s=deficit_us / 1_000_000)


def tightest(windows: list[RateWindow]) -> RateWindow | None:
    """The one that lets least pass now."""
    return min(windows, key=lambda window: (window.remaining, window.limit), default=None)
