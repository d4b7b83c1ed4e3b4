"""How often a secret may be guessed at: on Redis, so that all workers count together.

Knows no password.

A stranger must not be able to lock the owner of an account out, so nothing is counted against the
account alone that would stop its owner:

- Attempts at one account from one address wait for each other, longer each time.
- So do attempts at any accounts from one address, later: for who tries one password on all.
- Attempts at one account from everywhere are bounded too, for who has many addresses; but not from
  an address, nor from a browser (its device cookie), from which its owner got in before.
- A browser that its owner got in with is counted by itself, not by its address: neighbours behind
  one address do not lock each other out.

A counter is charged before the secret is looked at. A success forgets what stands against the
account at that address or browser, and against nobody else's.

What machines show, many at once and mostly right, is not charged beforehand: of that failures count
(`FailureCount`), by whose and from where; what was right before is known (`know`), and stopped by
none.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

import msgspec
from redis.asyncio import Redis

PREFIX = "tollgate:attempts"
KNOWN_S = 90 * 86_400
"""So long an address is its owner's after they got in from there, and a client's secret known."""
IPV6_PREFIX = 64
"""One customer has so much of an IPv6 network at least."""
SCRIPT = Path(__file__).with_name("attempt.lua").read_text()
SO_FAR = Path(__file__).with_name("attempts_so_far.lua").read_text()


class AttemptLimit(msgspec.Struct, frozen=True, kw_only=True):
    """After `free` attempts each waits twice as long as the one before it."""

    name: str
    free: int
    first_s: float
    longest_s: float
    lifetime_s: float
    """Without an attempt for so long, all is forgotten."""

    def arguments(self) -> list[int]:
        seconds = (self.first_s, self.longest_s, self.lifetime_s)
        return [self.free, *(int(each * 1000) for each in seconds)]


PAIR = AttemptLimit(name="pair", free=5, first_s=1.0, longest_s=900.0, lifetime_s=3_600.0)
ADDRESS = AttemptLimit(name="address", free=50, first_s=1.0, longest_s=300.0, lifetime_s=900.0)
ACCOUNT = AttemptLimit(name="account", free=100, first_s=1.0, longest_s=60.0, lifetime_s=3_600.0)


FAILED = AttemptLimit(name="failed", free=10, first_s=60.0, longest_s=300.0, lifetime_s=900.0)


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """The failures counted so far against one account at one address."""

    wait_s: float = 0.0
    """0: it may be tried now."""
    count: int = 0


class TooManyAttempts(Exception):
    """Too many attempts: none before `delay_s` more."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"wait {delay_s:.0f} s")
        self.delay_s = delay_s


class LoginAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that `Throttle.begin` charged: which account, from which address."""

    kind: str
    account: str
    address: str
    device: str | None
    """The account's own browser, proven by its cookie."""


def network_of(address: str | None) -> str:
    """Return the network that shares a counter: an IPv4 address, an IPv6 network; callers of no
    known address share one."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))


class Throttle:
    """`redis` must not decode responses."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._script = redis.register_script(SCRIPT)
        self._so_far = redis.register_script(SO_FAR)

    async def begin(
        self, kind: str, *, account: str, address: str | None, device: str | None = None
    ) -> LoginAttempt:
        """Charge an attempt before the secret is looked at. `account`: as it was typed, existing or
        not.

        Raises: TooManyAttempts, redis.exceptions.RedisError.
        """
        attempt = LoginAttempt(
            kind=kind, account=account, address=network_of(address), device=device
        )
        bounds = {_pair(attempt): PAIR}
        if device is None:
            bounds[_key(kind, ADDRESS.name, attempt.address)] = ADDRESS
            if not await self._redis.exists(_known(attempt)):
                bounds[_key(kind, ACCOUNT.name, account)] = ACCOUNT
        await self._charge(bounds)
        return attempt

    async def count(
        self, kind: str, *, address: str | None, each: AttemptLimit, all_: AttemptLimit
    ) -> None:
        """Count something that anybody may do, so often an address and so often altogether.

        Raises: TooManyAttempts, redis.exceptions.RedisError.
        """
        own = _key(kind, each.name, network_of(address))
        await self._charge({own: each, _key(kind, all_.name): all_})

    async def failures(self, kind: str, *, account: str, address: str) -> FailureCount:
        """Raises: redis.exceptions.RedisError."""
        wait_ms, count = await self._so_far(keys=[_failed(kind, account, address)])
        return FailureCount(wait_s=int(wait_ms) / 1000, count=int(count))

    async def failed(self, kind: str, *, account: str, address: str) -> None:
        """Count one more failure. Raises: redis.exceptions.RedisError."""
        await self._script(keys=[_failed(kind, account, address)], args=FAILED.arguments())

    async def forget(self, kind: str, *, account: str, address: str) -> None:
        """Drop the failures of an account that got in after all. Raises:
        redis.exceptions.RedisError."""
        await self._redis.delete(_failed(kind, account, address))

    async def know(self, kind: str, account: str, digest: str) -> None:
        """Remember that `account` got in with what `digest`, a keyed one, is of.

        Raises: redis.exceptions.RedisError.
        """
        await self._redis.set(_key(kind, "right", account, digest), b"1", ex=KNOWN_S)

    async def knows(self, kind: str, account: str, digest: str) -> bool:
        """Raises: redis.exceptions.RedisError."""
        return bool(await self._redis.exists(_key(kind, "right", account, digest)))

    async def unknow(self, kind: str, account: str, digest: str) -> None:
        """Forget what `know` remembered; idempotent. Raises: redis.exceptions.RedisError."""
        await self._redis.delete(_key(kind, "right", account, digest))

    async def _charge(self, bounds: Mapping[str, AttemptLimit]) -> None:
        arguments = [each for bound in bounds.values() for each in bound.arguments()]
        wait_ms = await self._script(keys=list(bounds), args=arguments)
        if wait_ms:
            raise TooManyAttempts(int(wait_ms) / 1000)

    async def succeeded(self, attempt: LoginAttempt) -> None:
        """The secret was right: from here the account's owner gets in."""
        await self._redis.delete(_pair(attempt))
        await self._redis.set(_known(attempt), b"1", ex=KNOWN_S)


def _key(kind: str, counter: str, *parts: str) -> str:
    """Return the key of a counter; accounts stand hashed: what people type into the field may be a
    password."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PREFIX}:{kind}:{counter}:{digest[:32]}"


def _pair(attempt: LoginAttempt) -> str:
    if attempt.device is not None:
        return _key(attempt.kind, "device", attempt.account, attempt.device)
    return _key(attempt.kind, PAIR.name, attempt.account, attempt.address)


def _failed(kind: str, account: str, address: str) -> str:
    return _key(kind, FAILED.name, account, network_of(address))


def _known(attempt: LoginAttempt) -> str:
    return _key(attempt.kind, "known", attempt.account, attempt.address)
