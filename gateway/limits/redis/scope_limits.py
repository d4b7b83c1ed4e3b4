"""The limits of one scope, as the scripts read them. Pure data."""

from __future__ import annotations

from typing import Literal

import msgspec

ScopeName = Literal["key", "key_model", "model", "client", "project", "org"]
"""`key_model`: what a key may use of a model; `model`: what a project may. `client`: an OAuth
client."""


class BucketLimit(msgspec.Struct, frozen=True, array_like=True):
    """The limit of one bucket, as `admit.lua` reads it."""

    letter: str
    """The letter of its `PlanLimit`."""
    limit: int
    """Units per window."""
    burst: int
    """Units that a full bucket holds."""
    window_us: int


class CounterCap(msgspec.Struct, frozen=True):
    """A hard cap on what a counter in Redis, `key`, may come to."""

    key: str
    amount_nano: int
    is_funded: bool
    """And no more than is leased of a balance."""
    share: int = 1_000_000
    """The part, in millionths, that a cell has of what was left under it when its counter was
    built."""


class ScopeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one owner that limits a request."""

    scope: ScopeName
    owner_id: str
    buckets: tuple[BucketLimit, ...]
    max_streams: int | None
    plan: ScopeLimits | None = None
    """The limits of which these are a cell's part; None: these are those of a plan."""

    @property
    def of_plan(self) -> ScopeLimits:
        return self.plan or self
