"""The listener outlives what stalls its process: without it no revocation is heard again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING, ChangeListener

HEARD_TIMEOUT_S = 60.0


class Kept:
    """A subscription whose library, told to stop waiting, returns what it has got meanwhile: as
    redis-py does where a stalled loop finds both in one turn."""

    def __init__(self, *, kept: dict[str, Any] | None) -> None:
        self.kept = kept
        self.unread: list[dict[str, Any]] = []

    async def subscribe(self, channel: str) -> None:
        self.unread.append({"type": "subscribe", "channel": channel.encode(), "data": 1})

    async def ping(self, _text: str) -> None:
        return None

    async def get_message(self, *, timeout: float) -> dict[str, Any] | None:
        if self.unread:
            return self.unread.pop()
        try:
            await asyncio.sleep(HEARD_TIMEOUT_S)
        except asyncio.CancelledError:
            if self.kept is None:
                raise
            kept, self.kept = self.kept, None
            return kept
        return None

    async def aclose(self) -> None:
        return None


class KeptRedis:
    def __init__(self, kept: dict[str, Any] | None) -> None:
        self.kept = [kept]

    def pubsub(self) -> Kept:
        return Kept(kept=self.kept.pop() if self.kept else None)


@pytest.mark.parametrize("kept", [{"type": "pong", "data": b"1.0"}, {"type": "message", "data": 0}])
async def test_an_answer_at_the_end_of_patience_ends_no_listener(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is given up, and the next one subscribes."""
    monkeypatch.setattr(changes, "SILENCE_S", 0.1)
    heard: asyncio.Queue[str] = asyncio.Queue()
    store: Any = KeptRedis(kept)
    listener = ChangeListener(store, heard.put_nowait)
    await listener.start(timeout_s=0.01)
    async with asyncio.timeout(HEARD_TIMEOUT_S):
        assert [await heard.get(), await heard.get()] == [EVERYTHING, EVERYTHING]
    await listener.close()
