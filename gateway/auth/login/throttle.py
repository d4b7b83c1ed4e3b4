"""Bounds how often a secret may be guessed. Counters are on Redis, so that all workers share them.

A stranger must not be able to lock the owner of an account out, so no counter of the account alone
stops its owner:

- Attempts at one account from one address wait, longer each time.
- Attempts at any accounts from one address wait too, later: against one password tried on many
  accounts.
- Attempts at one account from everywhere are bounded too, against guesses from many addresses; but
  not from an address or browser (its device cookie) from which the owner signed in before.
- A browser from which the owner signed in has a counter of its own instead of its address's: users
  behind one address do not lock each other out.

A counter is charged before the secret is checked. A success resets the counter of the account at
that address or browser, and no other.

Secrets of machines come often and are mostly right, so they are not charged beforehand: only their
failures count (`FailureCount`), per account and address. A secret that was right before (`know`) is
never blocked.
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
"""The lifetime of an entry that says that an owner signed in from an address, or a secret was
right."""
IPV6_PREFIX = 64
"""The smallest IPv6 network that one customer gets."""
SCRIPT = Path(__file__).with_name("attempt.lua").read_text()
SO_FAR = Path(__file__).with_name("attempts_so_far.lua").read_text()


class AttemptLimit(msgspec.Struct, frozen=True, kw_only=True):
    """After `free` attempts each one waits twice as long as the one before, from `first_s` on."""

    name: str
    free: int
    first_s: float
    longest_s: float
    lifetime_s: float
    """The counter is reset after so long without an attempt."""

    def arguments(self) -> list[int]:
        seconds = (self.first_s, self.longest_s, self.lifetime_s)
        return [self.free, *(int(each * 1000) for each in seconds)]


PAIR = AttemptLimit(name="pair", free=5, first_s=1.0, longest_s=900.0, lifetime_s=3_600.0)
ADDRESS = AttemptLimit(name="address", free=50, first_s=1.0, longest_s=300.0, lifetime_s=900.0)
ACCOUNT = AttemptLimit(name="account", free=100, first_s=1.0, longest_s=60.0, lifetime_s=3_600.0)


FAILED = AttemptLimit(name="failed", free=10, first_s=60.0, longest_s=300.0, lifetime_s=900.0)


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """The failures so far of one account at one address."""

    wait_s: float = 0.0
    """0: the next attempt may come now."""
    count: int = 0


class TooManyAttempts(Exception):
    """Too many attempts: the next one may come in `delay_s` seconds."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"wait {delay_s:.0f} s")
        self.delay_s = delay_s


class LoginAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that `Throttle.begin` charged: which account, from which address."""

    kind: str
    account: str
    address: str
    device: str | None
    """The name in a valid device cookie of the account."""


def network_of(address: str | None) -> str:
    """Return the network that shares a counter: an IPv4 address, an IPv6 network, or "unknown"."""
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
        """Charge an attempt before the secret is checked. `account`: as it was typed, whether it
        exists or not.

        Raises: TooManyAttempts, redis.exceptions.RedisError.
        """
        [attempt] = await self.begin_all(kind, {account: device}, address=address)
        return attempt

    async def begin_all(
        self, kind: str, accounts: Mapping[str, str | None], *, address: str | None
    ) -> list[LoginAttempt]:
        """Charge one attempt of a secret at several accounts: each by its own counters, their
        address once. `accounts`: with the name in a valid device cookie of each.

        Raises: TooManyAttempts, redis.exceptions.RedisError.
        """
        attempts, bounds = [], {}
        for account, device in accounts.items():
            attempt = LoginAttempt(
                kind=kind, account=account, address=network_of(address), device=device
            )
            attempts.append(attempt)
            bounds[_pair(attempt)] = PAIR
            if device is None:
                bounds[_key(kind, ADDRESS.name, attempt.address)] = ADDRESS
                if not await self._redis.exists(_known(attempt)):
                    bounds[_key(kind, ACCOUNT.name, account)] = ACCOUNT
        await self._charge(bounds)
        return attempts

    async def count(
        self, kind: str, *, address: str | None, each: AttemptLimit, all_: AttemptLimit
    ) -> None:
        """Count an operation that anybody may do: by `each` per address, by `all_` altogether.

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
        """Reset the failures of an account at an address. Raises: redis.exceptions.RedisError."""
        await self._redis.delete(_failed(kind, account, address))

    async def know(self, kind: str, account: str, digest: str) -> None:
        """Remember that a secret was right. `digest`: a keyed hash of it.

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
        """Record that the secret was right: this address or browser is the owner's."""
        await self._redis.delete(_pair(attempt))
        await self._redis.set(_known(attempt), b"1", ex=KNOWN_S)


def _key(kind: str, counter: str, *parts: str) -> str:
    """Return the key of a counter. Accounts are hashed: what people type there may be a
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
