"""Keys at a client's own URI: kept, and asked for a bounded number of times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.auth.oauth.rfc7523_assertion import KEYS_KEPT_S, KEYS_RETRY_S, ClientKeys
from gateway.net.egress import EgressFailed, FetchResponse
from tests.gateway.auth.parts import Clock
from tests.pace import within

URI = "https://app.example.com/jwks"


class FarEnd:
    def __init__(self) -> None:
        self.asked = 0
        self.body: bytes | None = b'{"keys": []}'
        self.slow = asyncio.Event()

    async def get(self, url: str) -> FetchResponse:
        self.asked += 1
        await asyncio.sleep(0)
        if "slow" in url:
            await self.slow.wait()
        if self.body is None:
            raise EgressFailed("refused")
        headers = {"content-type": "application/json"}
        return FetchResponse(url=url, status=200, headers=headers, body=self.body)


async def test_keys_are_kept_for_a_while() -> None:
    far_end, clock = FarEnd(), Clock()
    keys: Any = ClientKeys(far_end, clock=clock)  # type: ignore[arg-type]
    assert [await keys.fetch(URI) for _ in range(3)] == [{"keys": []}] * 3
    clock.now += KEYS_KEPT_S
    far_end.body = b'{"keys": [1]}'
    assert await keys.fetch(URI) == {"keys": [1]}
    assert far_end.asked == 2


async def test_who_does_not_answer_is_left_alone_for_a_while() -> None:
    far_end, clock = FarEnd(), Clock()
    keys: Any = ClientKeys(far_end, clock=clock)  # type: ignore[arg-type]
    for body in (None, b"[]"):
        far_end.body, before = body, far_end.asked
        assert [await keys.fetch(URI) for _ in range(3)] == [None] * 3
        assert far_end.asked == before + 1
        clock.now += KEYS_RETRY_S
    far_end.body = b"{}"
    assert await keys.fetch(URI) == {}


async def test_nobody_whose_keys_are_kept_waits_for_one_that_is_slow() -> None:
    far_end = FarEnd()
    keys = ClientKeys(far_end)  # type: ignore[arg-type]
    await keys.fetch(URI)
    many = [f"https://slow{number}.example.com/jwks" for number in range(64)]
    waiting = [asyncio.create_task(keys.fetch(each)) for each in many * 2]
    await asyncio.sleep(0.01)
    async with within(1.0):
        assert await keys.fetch(URI) == {"keys": []}
    assert far_end.asked == 1 + len(many), "each is asked once, however many want it"
    waiting[0].cancel()
    far_end.slow.set()
    assert await asyncio.gather(*waiting[1:]) == [{"keys": []}] * (len(waiting) - 1)
    assert len(keys._fetches) == 0


async def test_closing_ends_what_is_on_its_way() -> None:
    keys = ClientKeys(FarEnd())  # type: ignore[arg-type]
    asking = asyncio.create_task(keys.fetch("https://slow.example.com/jwks"))
    await asyncio.sleep(0.01)
    await keys.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
