"""Events of streams are kept, so that clients read on: so much of one tenant."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from foundation.tasks import TaskSet
from mcp_bridge.routing.guard import MAX_NOTIFICATIONS, Guard
from mcp_bridge.routing.sessions import (
    MAX_EVENTS,
    Session,
    SessionFacts,
    Sessions,
    StreamHead,
    events_key,
    kept_keys,
)
from mcp_bridge.server.streams import MAX_QUEUED, MAX_TOGETHER, Stream, ends
from tests.mcp_bridge.processes import LegacyClient
from tests.mcp_bridge.test_hostile import OK, SSE, Server, bridged

MOST = 64 * 1024
BIG = b"x" * 4000
HEAD = StreamHead("w", 1)
UNUSED: Any = None


@pytest.fixture
def sessions(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr("mcp_bridge.routing.sessions.MAX_KEPT_BYTES_OF_ORG", MOST)
    return Sessions(redis, UNUSED)


def session_of(org_id: str) -> Session:
    about = SessionFacts(principal="p", endpoint="", version="2025-11-25", capabilities={})
    return Session(id="s", org_id=org_id, about=about)


async def flood(sessions: Sessions, session: Session, count: int) -> None:
    for n in range(count):
        await sessions.begin_stream(session, f"s{n}", StreamHead("w", n))
        assert await sessions.keep(session, f"s{n}", HEAD, {2: BIG})


async def counted(sessions: Sessions, org_id: str) -> dict[str, int]:
    found: Any = await sessions._redis.hgetall(kept_keys(org_id)[1])
    return {name.decode(): int(size) for name, size in found.items()}


async def test_who_floods_loses_the_oldest_of_theirs_alone(sessions: Sessions) -> None:
    theirs, others = session_of("org_a"), session_of("org_b")
    await sessions.begin_stream(others, "s0", StreamHead("w", 1))
    await flood(sessions, theirs, 40)
    kept = [n for n in range(40) if await sessions.head_of(theirs, f"s{n}") is not None]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) == MOST // 5030
    assert not await sessions.keep(theirs, "s0", HEAD, {3: b"late"}), "it does not begin anew"
    assert await sessions.read_on(theirs, "s0", 1) == []
    assert await sessions.read_on(theirs, "s39", 1) == [(2, BIG)]
    assert await sessions.head_of(others, "s0") == StreamHead("w", 1)
    sizes = await counted(sessions, "org_a")
    assert sizes.pop("total") == sum(sizes.values()) <= MOST
    assert len(sizes) == len(kept)


async def test_what_is_over_is_counted_no_more(sessions: Sessions) -> None:
    session = session_of("org_a")
    await flood(sessions, session, 2)
    over = events_key(session, "s0")
    await sessions._redis.zadd(kept_keys("org_a")[0], {over: 1})
    await sessions._redis.delete(over)
    await sessions.keep(session, "s1", HEAD, {3: b"more"})
    sizes = await counted(sessions, "org_a")
    assert over not in sizes and sizes.pop("total") == sum(sizes.values())


async def test_a_stream_that_is_forgotten_goes_on_without_ids(sessions: Sessions) -> None:
    session = session_of("org_a")
    stream = Stream(sessions, session, "w", 1, TaskSet())
    await stream.put({"jsonrpc": "2.0", "method": "notifications/message"})
    primed, first = await stream.next(), await stream.next()
    assert primed is not None and first is not None and b"id: " in first
    await flood(sessions, session, 20)
    await stream.put({"jsonrpc": "2.0", "method": "notifications/message"})
    second = await stream.next()
    assert second is not None and b"id: " not in second and b"notifications" in second
    stream.leave()
    assert not stream.can_be_heard


PROGRESS = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1}}


def answer(id: Any, text: str = "") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": {"text": text}}


async def test_a_stream_of_many_events_is_read_on_from_what_is_left(redis: Redis) -> None:
    sessions, session = Sessions(redis, UNUSED), session_of("org_a")
    stream = Stream(sessions, session, "w", 7, TaskSet())
    stream.leave()
    for _ in range(MAX_EVENTS + 300):
        await stream.put(PROGRESS)
    await stream.finish(answer(7))
    assert await sessions.head_of(session, stream.name) == StreamHead("w", 7)
    left = await sessions.read_on(session, stream.name, MAX_EVENTS + 299)
    assert ends(left[-1][1], 7) and not ends(left[0][1], 7)


async def test_an_answer_is_kept_however_large_and_whatever_came_before(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_bridge.server.streams.MAX_KEPT_BYTES", 1_000)
    sessions, session = Sessions(redis, UNUSED), session_of("org_a")
    stream = Stream(sessions, session, "w", 7, TaskSet())
    stream.leave()
    for _ in range(100):
        await stream.put(PROGRESS)
    await stream.finish(answer(7, "x" * 5_000))
    events = await sessions.read_on(session, stream.name, 1)
    assert sum(len(data) for _, data in events[:-1]) <= 1_000
    assert ends(events[-1][1], 7) and len(events[-1][1]) > 5_000


FLOOD = 9_000


@pytest.mark.parametrize("is_modern", [False, True], ids=["older", "newer"])
async def test_a_storm_of_notifications_is_bounded_and_kept_in_few_trips(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, is_modern: bool
) -> None:
    trips: list[int] = []
    denials: list[tuple[str, str, str]] = []
    keep = Sessions.keep

    async def counted_keep(self: Sessions, *place: Any) -> bool:
        trips.append(len(place[-1]))
        return await keep(self, *place)

    async def denied(self: Guard, caller: Any, upstream: Any, *said: str) -> None:
        denials.append(said)

    monkeypatch.setattr(Sessions, "keep", counted_keep)
    monkeypatch.setattr(Guard, "note_declined", denied)
    monkeypatch.setattr("mcp_bridge.routing.guard.NOTIFICATIONS_PER_S", 0)
    monkeypatch.setattr("mcp_bridge.server.streams.READER_PATIENCE_S", 60.0)

    def flooding(server: Server, writer: Any, message: Any) -> bytes:
        token = message["params"]["_meta"]["progressToken"]
        said: list[Any] = [
            {**PROGRESS, "params": {"progressToken": token, "progress": n}} for n in range(FLOOD)
        ]
        said.append({"jsonrpc": "2.0", "id": message["id"], "result": {"content": []}})
        body = b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in said)
        return OK + SSE + b"content-length: %d\r\n\r\n" % len(body) + body

    params = {"name": "anything", "arguments": {}, "_meta": {"progressToken": "t"}}
    async with bridged(redis, Server(flooding, modern=is_modern)) as client:
        session = await LegacyClient.open(client, "/mcp")
        async with session.stream("/mcp", "tools/call", params) as events:
            seen = [message async for _, message in events if message is not None]
    assert "result" in seen[-1], "the answer comes behind the storm"
    shown = [message["params"]["progress"] for message in seen[:-1]]
    assert shown == list(range(MAX_NOTIFICATIONS))
    assert denials == [("notifications", "anything", "too_many_notifications")]
    assert sum(trips) == MAX_NOTIFICATIONS + 2 and len(trips) < MAX_NOTIFICATIONS / 2


async def test_an_answer_does_not_wait_for_a_slow_reader(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_bridge.server.streams.READER_PATIENCE_S", 0.01)
    sessions, session = Sessions(redis, UNUSED), session_of("org_a")
    stream = Stream(sessions, session, "w", 7, TaskSet())
    for _ in range(MAX_QUEUED + MAX_TOGETHER):
        stream.say(PROGRESS)
    await stream.finish(answer(7))
    assert not stream._has_reader, "it is disconnected, and may read on"
    left = await sessions.read_on(session, stream.name, MAX_QUEUED + MAX_TOGETHER)
    assert ends(left[-1][1], 7)


async def test_a_stream_whose_events_cannot_be_kept_ends_for_its_reader(redis: Redis) -> None:
    sessions, session = Sessions(redis, UNUSED), session_of("org_a")
    stream = Stream(sessions, session, "w", 7, TaskSet())

    async def fail(*_: Any) -> bool:
        raise ConnectionError

    sessions.keep = fail  # type: ignore[method-assign]
    stream.say(PROGRESS)
    with pytest.raises(ConnectionError):
        await stream.finish(answer(7))
    assert await stream.next() is None
    with pytest.raises(ConnectionError):
        stream.say(PROGRESS)


@pytest.mark.parametrize("request_id", ["", 0, "a"])
async def test_any_id_of_a_request_is_told_from_the_sessions_own_stream(
    redis: Redis, request_id: Any
) -> None:
    sessions, session = Sessions(redis, UNUSED), session_of("org_a")
    for wanted in (request_id, None):
        stream = Stream(sessions, session, "w", wanted, TaskSet())
        await stream.prime()
        assert await sessions.head_of(session, stream.name) == StreamHead("w", wanted)


async def test_reading_on_behind_an_answer_ends_at_once(redis: Redis) -> None:
    """Nothing comes any more, and its owner lives on."""

    def told(server: Server, writer: Any, message: Any) -> bytes:
        said = [{**PROGRESS, "params": {"progressToken": "t", "progress": 1}}]
        said.append({"jsonrpc": "2.0", "id": message["id"], "result": {"content": []}})
        body = b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in said)
        return OK + SSE + b"content-length: %d\r\n\r\n" % len(body) + body

    params = {"name": "anything", "arguments": {}, "_meta": {"progressToken": "t"}}
    async with bridged(redis, Server(told, modern=False)) as client:
        session = await LegacyClient.open(client, "/mcp")
        async with session.stream("/mcp", "tools/call", params) as events:
            seen = [event async for event in events]
        assert seen[-1][1]["id"] == 1 and seen[-1][0] is not None
        async with session.listen("/mcp", seen[-1][0]) as events:
            assert [message async for _, message in events] == []
        before = next(id_ for id_, _ in seen if id_ is not None)
        async with session.listen("/mcp", before) as events:
            again = [message async for _, message in events if message is not None]
        assert again == [message for _, message in seen if message is not None]
