"""Calls that wait for their turn are not calls that Redis leaves unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from gateway.limits import scripts
from gateway.limits.scripts import MAX_CONCURRENT_CALLS, LimiterUnavailable, Scripts

CALL_S = 0.2
KEYS = ["tollgate:{org_slots}:leases", "tollgate:{org_slots}:lease:"]
ANSWERS = {0, 3}
"""The first finds no such lease, the others that it is closed."""


def slow(store: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Each call takes `CALL_S` on its way."""
    made = Scripts(store)
    inner: Callable[..., Awaitable[Any]] = made._scripts["settle"]

    async def delayed(**arguments: Any) -> Any:
        await asyncio.sleep(CALL_S)
        return await inner(**arguments)

    monkeypatch.setitem(made._scripts, "settle", delayed)
    return made


async def settle(made: Scripts) -> object:
    return await made.call("settle", KEYS, ["lease", 0, 1])


async def test_waiting_for_a_slot_is_not_part_of_the_call(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "SCRIPT_TIMEOUT_S", 5 * CALL_S)
    made = slow(redis, monkeypatch)
    rounds = 7  # the last one waits longer than a call may take
    calls = (settle(made) for _ in range(rounds * MAX_CONCURRENT_CALLS))
    assert set(await asyncio.gather(*calls)) == ANSWERS


async def test_a_queue_too_long_is_said_and_costs_no_slot(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "SLOT_TIMEOUT_S", CALL_S / 4)
    made = slow(redis, monkeypatch)
    calls = [asyncio.create_task(settle(made)) for _ in range(MAX_CONCURRENT_CALLS + 1)]
    with pytest.raises(LimiterUnavailable, match="no free slot"):
        await calls.pop()
    assert set(await asyncio.gather(*calls)) == ANSWERS
    again = (settle(made) for _ in range(MAX_CONCURRENT_CALLS))
    assert set(await asyncio.gather(*again)) == {0}
