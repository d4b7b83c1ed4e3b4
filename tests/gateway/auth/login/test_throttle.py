"""How often a secret may be guessed at, and whom that does not lock out."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.auth.login import throttle as throttling
from gateway.auth.login.throttle import (
    ACCOUNT,
    ADDRESS,
    PAIR,
    PREFIX,
    Throttle,
    TooManyAttempts,
    network_of,
)

HERE, THERE = "192.0.2.1", "198.51.100.1"


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait ends while a test makes its attempts, however busy the machine is."""
    for limit in (PAIR, ADDRESS, ACCOUNT):
        longer = msgspec.structs.replace(limit, first_s=60.0)
        monkeypatch.setattr(throttling, limit.name.upper(), longer)


async def end_waits(redis: Redis) -> None:
    """As if every wait were over."""
    async for key in redis.scan_iter(f"{PREFIX}:*", _type="hash"):
        await redis.hset(key, "until", 0)


async def tries(
    throttle: Throttle, times: int, *, account: str = "a", address: str = HERE, device: str = ""
) -> int:
    """How many of so many are let through."""
    passed = 0
    for _ in range(times):
        try:
            await throttle.begin("t", account=account, address=address, device=device or None)
        except TooManyAttempts as waits:
            assert 0 < waits.delay_s <= 900
        else:
            passed += 1
    return passed


async def test_one_address_guesses_at_one_account_a_few_times(redis: Redis) -> None:
    throttle = Throttle(redis)
    assert await tries(throttle, 20) == PAIR.free
    assert await tries(throttle, 3, account="b") == 3, "another account is another's"
    assert await tries(throttle, 3, address=THERE) == 3, "another address is another's"


async def test_attempts_at_once_are_as_many(redis: Redis) -> None:
    throttle = Throttle(redis)
    passed = await asyncio.gather(*(tries(throttle, 1) for _ in range(30)))
    assert sum(passed) == PAIR.free


async def test_a_success_forgets_and_a_wait_ends(redis: Redis) -> None:
    throttle = Throttle(redis)
    attempt = await throttle.begin("t", account="a", address=HERE)
    await throttle.succeeded(attempt)
    assert await tries(throttle, 20) == PAIR.free
    await end_waits(redis)
    assert await tries(throttle, 2) == 1, "and the next wait is longer"


async def test_one_address_does_not_try_one_password_on_everybody(redis: Redis) -> None:
    throttle = Throttle(redis)
    passed = [await tries(throttle, 1, account=f"a{n}") for n in range(ADDRESS.free + 10)]
    assert sum(passed) == ADDRESS.free
    assert await tries(throttle, 1, account="new", address=THERE) == 1


async def test_strangers_from_everywhere_do_not_lock_the_owner_out(redis: Redis) -> None:
    throttle = Throttle(redis)
    at_home = await throttle.begin("t", account="a", address=HERE)
    await throttle.succeeded(at_home)
    strangers = [f"203.0.{n // 250}.{n % 250}" for n in range(ACCOUNT.free + 20)]
    passed = [await tries(throttle, 1, address=each) for each in strangers]
    assert sum(passed) < len(strangers), "many addresses are bounded together"
    assert await tries(throttle, 1, address="203.1.0.1") == 0
    assert await tries(throttle, 3) == 3, "but not the one where its owner got in"
    assert await tries(throttle, 3, address="203.1.0.1", device="own") == 3, "nor their browser"


async def test_neighbours_behind_one_address_do_not_lock_a_known_browser_out(
    redis: Redis,
) -> None:
    throttle = Throttle(redis)
    await tries(throttle, 20)
    for n in range(ADDRESS.free + 5):
        await tries(throttle, 1, account=f"x{n}")
    assert await tries(throttle, 1) == 0
    assert await tries(throttle, 20, device="own") == PAIR.free, "it has its own bound"


def test_who_shares_a_counter() -> None:
    assert network_of("192.0.2.7") == network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of(None) == network_of("nonsense") == "unknown"
