"""Computes what the limiter's buckets must hold, the slow way: by replaying all that happened.

A bucket is a list of (moment, cost); a refund rewrites what its lease took at the start; the
deficit is found by running through the list. No marks, no moments of fullness: nothing is shared
with `ledger.lua` but the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.limits.redis import scripts

CLOCK_KEY = "test:now"
MINUTE_US = 60_000_000
LEASE_TTL_US = 60_000_000


def rewrite_scripts(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Limiters made from now on run their scripts with `new` in place of `old`."""
    original = scripts.script_text

    def text(name: str) -> str:
        assert old in original(name)
        return original(name).replace(old, new)

    monkeypatch.setattr(scripts, "script_text", text)


def move_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limiters made from now on read the time (microseconds) from CLOCK_KEY.

    Redis expires keys by its own clock, which runs on: scopes get an hour more.
    """
    rewrite_scripts(monkeypatch, "'PX', ttl_ms)", "'PX', ttl_ms + 3600000)")
    rewrite_scripts(monkeypatch, "redis.call('TIME')", f"{{0, redis.call('GET', '{CLOCK_KEY}')}}")


def cost_us(units: int, limit: int | None) -> int:
    """No limit and a limit of 0 hold no bucket."""
    if not limit:
        return 0
    return -(-units * MINUTE_US // limit)


@dataclass
class Taken:
    at_us: int
    cost_us: int


@dataclass
class Bucket:
    """`limit` None: unlimited."""

    limit: int | None
    taken: list[Taken] = field(default_factory=list)

    @property
    def burst(self) -> int:
        assert self.limit is not None
        return max(1, self.limit // 6)

    def deficit_us(self, now_us: int) -> int:
        deficit, last = 0, 0
        for taken in self.taken:
            deficit = max(0, deficit - (taken.at_us - last)) + taken.cost_us
            last = taken.at_us
        return max(0, deficit - (now_us - last))

    def wait_us(self, units: int, now_us: int) -> int | None:
        """None: for ever."""
        if self.limit is None or units == 0:
            return 0
        if units > self.limit:
            return None
        deficit = self.deficit_us(now_us)
        if units > self.burst:
            return deficit
        return max(0, deficit + cost_us(units, self.limit) - cost_us(self.burst, self.limit))

    def rest_us(self, now_us: int, *, resting: bool) -> int:
        """How long a stream must rest for this bucket's debt."""
        if not self.limit:
            return 0
        full = cost_us(self.burst, self.limit)
        debt = self.deficit_us(now_us) - full
        return debt if debt > 0 and (resting or debt >= full) else 0

    def take(self, units: int, now_us: int) -> Taken:
        taken = Taken(now_us, cost_us(units, self.limit))
        self.taken.append(taken)
        return taken


KINDS = ("t", "i", "o", "r")
Used = dict[str, int]
"""By kind."""


@dataclass
class Scope:
    buckets: dict[str, Bucket]
    max_leases: int | None
    leases: set[str] = field(default_factory=set)


@dataclass
class Charge:
    """The tokens that a lease has taken of one bucket, one after the other."""

    scope: Scope
    kind: str
    taken: list[Taken]

    @property
    def bucket(self) -> Bucket:
        return self.scope.buckets[self.kind]


@dataclass
class Lease:
    reserved: Used
    admitted_us: int
    expires_us: int
    charges: list[Charge]
    counted: list[tuple[int, int]]
    """(moment, tokens) that count against the windows over that moment."""
    known: Used = field(default_factory=dict)
    kept: Used = field(default_factory=dict)
    """The usage that was settled when the lease expired, if it was opened again afterwards."""
    state: str = "open"


class Oracle:
    """All scopes of one organization. `now_us` is moved by the test."""

    def __init__(self, scopes: dict[str, Scope]) -> None:
        self.now_us = 1_700_000_000_000_000
        self.scopes = scopes
        self.leases: dict[str, Lease] = {}

    def heal(self) -> None:
        """Release the leases that have expired, as each call does first."""
        for lease_id, lease in self.leases.items():
            if lease.state == "open" and lease.expires_us <= self.now_us:
                self.release(lease_id, lease.known | {"r": 1})
                lease.state = "expired"

    def release(self, lease_id: str, used: Used) -> None:
        lease = self.leases[lease_id]
        left = used.get("t", 0)
        for position, (at_us, tokens) in enumerate(lease.counted):
            lease.counted[position] = (at_us, min(left, tokens))
            left -= min(left, tokens)
        for charge in lease.charges:
            charge.scope.leases.discard(lease_id)
            settled = cost_us(used.get(charge.kind, 0), charge.bucket.limit)
            settled -= cost_us(lease.kept.get(charge.kind, 0), charge.bucket.limit)
            over = sum(taken.cost_us for taken in charge.taken) - settled
            if over < 0:
                charge.bucket.taken.append(Taken(self.now_us, -over))
            for taken in reversed(charge.taken):
                part = min(max(0, over), taken.cost_us)
                taken.cost_us -= part
                over -= part

    def wait_us(self, names: list[str], units: Used) -> int | None:
        """The longest wait over all scopes and kinds; None: for ever."""
        waits: list[int | None] = []
        for name in names:
            scope = self.scopes[name]
            waits += [
                bucket.wait_us(units[kind], self.now_us) for kind, bucket in scope.buckets.items()
            ]
            if scope.max_leases is not None and len(scope.leases) >= scope.max_leases:
                waits.append(1_000_000 if scope.max_leases else None)
        return None if None in waits else max(wait for wait in waits if wait is not None)

    def admit(self, lease_id: str, names: list[str], units: Used) -> None:
        charges = []
        for name in names:
            scope = self.scopes[name]
            scope.leases.add(lease_id)
            for kind, bucket in scope.buckets.items():
                charges.append(Charge(scope, kind, [bucket.take(units[kind], self.now_us)]))
        self.leases[lease_id] = Lease(
            reserved=units,
            admitted_us=self.now_us,
            expires_us=self.now_us + LEASE_TTL_US,
            charges=charges,
            counted=[(self.now_us, units["t"])],
        )

    def extend(self, lease_id: str, units: Used, used: Used, *, resting: bool) -> int | None:
        """How long it must rest; None: it is not open."""
        lease = self.leases[lease_id]
        if lease.state != "open":
            return None
        for charge in lease.charges:
            if units.get(charge.kind, 0):
                charge.taken.append(charge.bucket.take(units[charge.kind], self.now_us))
        lease.counted.append((self.now_us, units["t"]))
        lease.known = used
        rests = [
            charge.bucket.rest_us(self.now_us, resting=resting)
            for charge in lease.charges
            if charge.kind != "r"
        ]
        return max(rests, default=0)

    def renew(self, lease_id: str, used: Used) -> None:
        lease = self.leases[lease_id]
        if lease.state == "expired":
            lease.kept = lease.known | {"r": 1}
            lease.state = "open"
            for charge in lease.charges:
                charge.taken = []
                charge.scope.leases.add(lease_id)
        lease.expires_us = self.now_us + LEASE_TTL_US
        lease.known = used

    def settle(self, lease_id: str, used: Used) -> str:
        lease = self.leases[lease_id]
        before, lease.state = lease.state, "settled"
        if before == "open":
            self.release(lease_id, used)
        elif before == "expired":
            for charge in lease.charges:
                now, kept = used.get(charge.kind, 0), lease.known.get(charge.kind, 0)
                if charge.kind != "r" and now > kept:
                    limit = charge.bucket.limit
                    extra = cost_us(now, limit) - cost_us(kept, limit)
                    charge.bucket.taken.append(Taken(self.now_us, extra))
        return before

    def check_windows(self) -> None:
        """In no 60 s does a bucket let pass more than its burst (or its largest request) and 60 s
        of refill, steps beyond reservations aside."""
        for scope in self.scopes.values():
            limit = scope.buckets["t"].limit
            if limit is None:
                continue
            passed = sorted(
                lease.counted[0]
                for lease in self.leases.values()
                if any(charge.scope is scope for charge in lease.charges)
            )
            for start, _ in passed:
                window = [n for at, n in passed if start <= at <= start + MINUTE_US]
                assert sum(window) <= max(scope.buckets["t"].burst, *window) + limit
