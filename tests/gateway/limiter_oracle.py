"""What the limiter's buckets must hold, found the slow way: by replaying all that happened.

A bucket is a list of (moment, cost); a refund rewrites what its lease took at the start; the
deficit is found by running through the list. No marks, no moments of fullness: nothing is shared
with `ledger.lua` but the definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.limits import scripts

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

    def take(self, units: int, now_us: int) -> Taken:
        taken = Taken(now_us, cost_us(units, self.limit))
        self.taken.append(taken)
        return taken


@dataclass
class Scope:
    tokens: Bucket
    requests: Bucket
    max_leases: int | None
    leases: set[str] = field(default_factory=set)


@dataclass
class Charge:
    scope: Scope
    tokens: Taken
    request: Taken


@dataclass
class Lease:
    reserved: int
    admitted_us: int
    expires_us: int
    charges: list[Charge]
    counted: int
    """Tokens that count against the window of `admitted_us`."""
    state: str = "open"


class Oracle:
    """All scopes of one organization. `now_us` is moved by the test."""

    def __init__(self, scopes: dict[str, Scope]) -> None:
        self.now_us = 1_700_000_000_000_000
        self.scopes = scopes
        self.leases: dict[str, Lease] = {}

    def heal(self) -> None:
        """What each call does first."""
        for lease_id, lease in self.leases.items():
            if lease.state == "open" and lease.expires_us <= self.now_us:
                self.release(lease_id, 0)
                lease.state = "expired"

    def release(self, lease_id: str, used: int) -> None:
        lease = self.leases[lease_id]
        lease.counted = min(used, lease.reserved)
        for charge in lease.charges:
            charge.scope.leases.discard(lease_id)
            settled = cost_us(used, charge.scope.tokens.limit)
            extra = settled - charge.tokens.cost_us
            charge.tokens.cost_us = min(settled, charge.tokens.cost_us)
            if extra > 0:
                charge.scope.tokens.taken.append(Taken(self.now_us, extra))

    def wait_us(self, names: list[str], tokens: int) -> int | None:
        """The longest wait over all scopes and kinds; None: for ever."""
        waits: list[int | None] = []
        for name in names:
            scope = self.scopes[name]
            waits += [scope.tokens.wait_us(tokens, self.now_us)]
            waits += [scope.requests.wait_us(1, self.now_us)]
            if scope.max_leases is not None and len(scope.leases) >= scope.max_leases:
                waits.append(1_000_000 if scope.max_leases else None)
        return None if None in waits else max(wait for wait in waits if wait is not None)

    def admit(self, lease_id: str, names: list[str], tokens: int) -> None:
        charges = []
        for name in names:
            scope = self.scopes[name]
            scope.leases.add(lease_id)
            taken = scope.tokens.take(tokens, self.now_us)
            charges.append(Charge(scope, taken, scope.requests.take(1, self.now_us)))
        expires_us = self.now_us + LEASE_TTL_US
        self.leases[lease_id] = Lease(tokens, self.now_us, expires_us, charges, counted=tokens)

    def settle(self, lease_id: str, used: int) -> str:
        lease = self.leases[lease_id]
        before, lease.state = lease.state, "settled"
        if before == "open":
            self.release(lease_id, used)
        elif before == "expired":
            for charge in lease.charges:
                if used:
                    charge.scope.tokens.take(used, self.now_us)
        return before

    def void(self, lease_id: str) -> str:
        before = self.settle(lease_id, 0)
        if before == "open":
            for charge in self.leases[lease_id].charges:
                charge.request.cost_us = 0
        return before

    def check_windows(self) -> None:
        """In no 60 s does a bucket let pass more than its burst (or its largest request) and 60 s
        of refill."""
        for scope in self.scopes.values():
            limit = scope.tokens.limit
            if limit is None:
                continue
            passed = sorted(
                (lease.admitted_us, lease.counted)
                for lease in self.leases.values()
                if any(charge.scope is scope for charge in lease.charges)
            )
            for start, _ in passed:
                window = [n for at, n in passed if start <= at <= start + MINUTE_US]
                assert sum(window) <= max(scope.tokens.burst, *window) + limit
