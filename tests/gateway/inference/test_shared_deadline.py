"""Waits that end together by one timer."""

from __future__ import annotations

import asyncio

import pytest

from gateway.inference.services import SharedDeadline


async def test_each_wait_ends_when_its_own_time_is_over() -> None:
    shared, ended = SharedDeadline(0.05), []

    async def wait(name: str) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                shared.begin(limit)
                try:
                    await asyncio.Event().wait()
                finally:
                    shared.end(limit)
        ended.append(name)

    first = asyncio.create_task(wait("first"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(wait("second"))
    await asyncio.wait_for(first, 30)
    await asyncio.wait_for(second, 30)
    assert ended == ["first", "second"]
    await asyncio.wait_for(wait("after a pause"), 30)


async def test_what_ends_in_time_hears_nothing() -> None:
    shared = SharedDeadline(0.0)
    async with asyncio.timeout(None) as limit:
        shared.begin(limit)
        shared.end(limit)
        await asyncio.sleep(0.01)
    assert not limit.expired()
