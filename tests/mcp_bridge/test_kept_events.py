"""What is kept of streams, so that clients read on: of one tenant so much."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from mcp_bridge.sessions import About, Session, Sessions, events_key, kept_keys
from mcp_bridge.streams import Stream

MOST = 64 * 1024
BIG = b"x" * 4000
UNUSED: Any = None


@pytest.fixture
def sessions(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr("mcp_bridge.sessions.MAX_KEPT_BYTES_OF_ORG", MOST)
    return Sessions(redis, UNUSED)


def session_of(org_id: str) -> Session:
    about = About(principal="p", endpoint="", version="2025-11-25", capabilities={})
    return Session(id="s", org_id=org_id, about=about)


async def flood(sessions: Sessions, session: Session, count: int) -> None:
    for n in range(count):
        await sessions.begin_stream(session, f"s{n}", "w", n)
        assert await sessions.keep(session, f"s{n}", 2, BIG)


async def counted(sessions: Sessions, org_id: str) -> dict[str, int]:
    found: Any = await sessions._redis.hgetall(kept_keys(org_id)[1])
    return {name.decode(): int(size) for name, size in found.items()}


async def test_who_floods_loses_the_oldest_of_theirs_alone(sessions: Sessions) -> None:
    theirs, others = session_of("org_a"), session_of("org_b")
    await sessions.begin_stream(others, "s0", "w", 1)
    await flood(sessions, theirs, 40)
    kept = [n for n in range(40) if await sessions.owner_of(theirs, f"s{n}") is not None]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) == MOST // 5300
    assert not await sessions.keep(theirs, "s0", 3, b"late"), "it does not begin anew"
    assert await sessions.read_on(theirs, "s0", 1) == []
    assert await sessions.read_on(theirs, "s39", 1) == [(2, BIG)]
    assert await sessions.owner_of(others, "s0") == ("w", 1)
    sizes = await counted(sessions, "org_a")
    assert sizes.pop("total") == sum(sizes.values()) <= MOST
    assert len(sizes) == len(kept)


async def test_what_is_over_is_counted_no_more(sessions: Sessions) -> None:
    session = session_of("org_a")
    await flood(sessions, session, 2)
    over = events_key(session, "s0")
    await sessions._redis.zadd(kept_keys("org_a")[0], {over: 1})
    await sessions._redis.delete(over)
    await sessions.keep(session, "s1", 3, b"more")
    sizes = await counted(sessions, "org_a")
    assert over not in sizes and sizes.pop("total") == sum(sizes.values())


async def test_a_stream_that_is_forgotten_goes_on_without_ids(sessions: Sessions) -> None:
    session = session_of("org_a")
    stream = Stream(sessions, session, "w", 1)
    await stream.put({"jsonrpc": "2.0", "method": "notifications/message"})
    primed, first = await stream.next(), await stream.next()
    assert primed is not None and first is not None and b"id: " in first
    await flood(sessions, session, 20)
    await stream.put({"jsonrpc": "2.0", "method": "notifications/message"})
    second = await stream.next()
    assert second is not None and b"id: " not in second and b"notifications" in second
    stream.leave()
    assert not stream.can_be_heard
