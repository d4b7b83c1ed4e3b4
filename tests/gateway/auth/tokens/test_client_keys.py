"""Keys at a client's own URI: kept, and asked for a bounded number of times."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.auth.client_keys import KEPT_S, RETRY_S, ClientKeys
from gateway.egress import EgressFailed, Fetched
from tests.gateway.auth.parts import Clock

URI = "https://app.example.com/jwks"


class FarEnd:
    def __init__(self) -> None:
        self.asked = 0
        self.body: bytes | None = b'{"keys": []}'

    async def get(self, url: str) -> Fetched:
        self.asked += 1
        await asyncio.sleep(0)
        if self.body is None:
            raise EgressFailed("refused")
        headers = {"content-type": "application/json"}
        return Fetched(url=url, status=200, headers=headers, body=self.body)


async def test_keys_are_kept_for_a_while() -> None:
    far_end, clock = FarEnd(), Clock()
    keys: Any = ClientKeys(far_end, clock=clock)  # type: ignore[arg-type]
    assert [await keys.fetch(URI) for _ in range(3)] == [{"keys": []}] * 3
    clock.now += KEPT_S
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
        clock.now += RETRY_S
    far_end.body = b"{}"
    assert await keys.fetch(URI) == {}
