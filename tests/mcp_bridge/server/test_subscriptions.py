"""A subscriber is told that a resource has changed, by which server, and what of it the rules
let."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.tasks import end_tasks
from mcp_bridge.protocol.envelope import read_envelope
from mcp_bridge.protocol.eras import LIST_CHANGES, RESOURCE_UPDATED
from mcp_bridge.protocol.rpc import DENIED
from mcp_bridge.routing import change_streams as changes
from mcp_bridge.routing.catalog import Catalog
from mcp_bridge.routing.change_streams import ACKNOWLEDGED, follow
from mcp_bridge.routing.paging import STALE_META
from mcp_bridge.routing.sessions import Sessions
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.trust.approvals import Approvals
from mcp_bridge.trust.policy import ToolRule
from mcp_bridge.trust.trust import Trust
from mcp_bridge.upstream import circuit_breaker as breaker
from tests.mcp_bridge.attacks.hostile import Attacker, Client, answer, attacked, caller_of, note
from tests.mcp_bridge.memory import (
    FreeMeter,
    MemoryApprovals,
    MemoryCalls,
    MemoryPins,
    MemoryRecords,
    MemoryRules,
)
from tests.mcp_bridge.processes import LegacyClient, ask_modern, messages_of, modern
from tests.mcp_bridge.test_hostile import KEYS, OK, SSE, whole

URL = "http://localhost/mcp"
SUBSCRIBE, UNSUBSCRIBE = "resources/subscribe", "resources/unsubscribe"
NOT_FOUND = -32002
CHANGED = note("notifications/tools/list_changed")
ALL = ToolRule(id="all", effect="allow")


def deny(*globs: str) -> ToolRule:
    return ToolRule(id="no", effect="deny", tools=globs)


def updated(uri: str) -> dict[str, Any]:
    return note(RESOURCE_UPDATED, uri=uri)


class Library(Attacker):
    """Lists `uris` and `templates`, reads what it `has`, and says what a test has it say to who
    listens. `listens`: of each who does, the URIs that it is to tell of."""

    def __init__(self, *uris: str, templates: tuple[str, ...] = (), modern: bool = False) -> None:
        super().__init__(self.by_method, modern=modern)
        self.uris, self.templates = list(uris), list(templates)
        self.has = {*uris}
        self.listens: asyncio.Queue[set[str]] = asyncio.Queue()
        self.was_heard = asyncio.Event()
        self.is_silent = False
        self.capabilities |= {"tools": {"listChanged": True}, "logging": {}}
        self._streams: list[asyncio.StreamWriter] = []

    def by_method(self, server: Any, writer: Any, message: Any) -> bytes:
        said: dict[str, Any] = {"resources": [{"uri": uri, "name": uri} for uri in self.uris]}
        if message["method"] == "resources/templates/list":
            found = [{"uriTemplate": each, "name": each} for each in self.templates]
            said = {"resourceTemplates": found}
        elif message["method"] == "resources/read":
            uri = message["params"]["uri"]
            if uri not in self.has:
                error = {"code": NOT_FOUND, "message": "Resource not found"}
                return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})
            said = {"contents": [{"uri": uri, "text": "x"}]}
        return whole(answer(message["id"], said))

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if self.is_silent:
            writer.write(b"HTTP/1.1 503 Later\r\ncontent-length: 0\r\n\r\n")
            return
        if message.get("id") == "heard":
            self.was_heard.set()
        if head.startswith("get ") or message.get("method") == "subscriptions/listen":
            self._streams.append(writer)
            writer.write(OK + SSE + b"\r\n: here\n\n")
            wanted = (message.get("params") or {}).get("notifications", {})
            if self.modern:
                self.say(note(ACKNOWLEDGED, notifications=wanted))
            await writer.drain()
            self.listens.put_nowait({*wanted.get("resourceSubscriptions", ())})
            await self.left.wait()
            return
        await super().reply(writer, message, head)

    def say(self, *messages: dict[str, Any]) -> None:
        """To who listens since last."""
        for message in messages:
            self._streams[-1].write(b"data: " + whole(message).partition(b"\r\n\r\n")[2] + b"\n\n")

    def asked(self, method: str) -> list[str]:
        return [each["params"]["uri"] for each in self.calls if each["method"] == method]


class World:
    """A bridge that asks rules and keeps records, before libraries that are vouched for."""

    def __init__(
        self, client: Client, guard: Trust, rules: MemoryRules, records: MemoryRecords
    ) -> None:
        self.client, self.guard = client, guard
        self.rules, self.records = rules, records

    def rule(self, *rules: ToolRule) -> None:
        self.rules.now = MemoryRules(*rules).now

    async def session(self) -> LegacyClient:
        return await LegacyClient.open(self.client, URL)

    @asynccontextmanager
    async def stream_of(self, session: LegacyClient) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield what is said on the session's stream, once it is left."""
        said: list[dict[str, Any]] = []
        getting = asyncio.create_task(self.client.get(URL, headers=session.headers))
        try:
            yield said
        finally:
            self.client.bridge.begin_drain()
            said += messages_of(await getting)

    @asynccontextmanager
    async def listening(self, *uris: str) -> AsyncIterator[asyncio.Queue[dict[str, Any]]]:
        wanted: dict[str, Any] = dict.fromkeys(LIST_CHANGES.values(), True)
        wanted["resourceSubscriptions"] = [*uris]
        message, headers = modern("subscriptions/listen", {"notifications": wanted}, id=5)
        given = [(name.lower(), value) for name, value in headers.items()]
        endpoint = self.client.bridge.endpoint("org_alice")
        assert endpoint is not None
        told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        envelope = read_envelope(message, given)
        listening = asyncio.create_task(
            self.client.bridge.modern.answer(
                caller_of("alice"), endpoint, envelope, message, given, told.put
            )
        )
        try:
            yield told
        finally:
            await end_tasks(listening)


@asynccontextmanager
async def world_of(store: Redis, *libraries: Library) -> AsyncIterator[World]:
    rules, records = MemoryRules(ALL), MemoryRecords()
    guard = Trust(
        catalog=Catalog(MemoryPins()),
        rules=rules,
        approvals=Approvals(MemoryApprovals(), now_s=lambda: 0.0, new_id=str, new_nonce=str),
        memory=MemoryCalls(),
        records=records,
        meter=FreeMeter(),
        new_id=lambda: "id",
    )
    async with asyncio.timeout(120):
        try:
            async with attacked(store, *libraries, guard=guard, trust="all") as client:
                try:
                    yield World(client, guard, rules, records)
                finally:
                    for library in libraries:
                        library.left.set()
        finally:
            await guard.close()


async def until(library: Library, *uris: str) -> None:
    """It is listened to for these."""
    while await library.listens.get() != {*uris}:
        pass


def two(is_modern: bool) -> tuple[Library, Library]:
    one = Library("a://a", modern=is_modern)
    return one, Library("b://b", templates=("t://{id}/1",), modern=is_modern)


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_session_subscribes_at_whose_it_is_alone(redis: Redis, is_modern: bool) -> None:
    """By what is listed, or a template matches; of what nobody lists no server hears."""
    one, other = two(is_modern)
    async with world_of(redis, one, other) as world:
        session = await world.session()
        async with world.stream_of(session):
            await until(one)
            await until(other)
            for uri in ("b://b", "t://x/1"):
                assert (await session.ask(URL, SUBSCRIBE, {"uri": uri}))["result"] == {}
            nobodys = await session.ask(URL, SUBSCRIBE, {"uri": "c://secret"})
            assert nobodys["error"]["code"] == NOT_FOUND
            assert nobodys["error"]["data"] == {"uri": "c://secret"}
            if is_modern:
                await until(other, "b://b", "t://x/1")
            assert (await session.ask(URL, UNSUBSCRIBE, {"uri": "b://b"}))["result"] == {}
            if is_modern:
                await until(other, "t://x/1")
            # What is no subscription of it ends nowhere.
            assert (await session.ask(URL, UNSUBSCRIBE, {"uri": "a://a"}))["result"] == {}
        assert one.asked(SUBSCRIBE) == one.asked(UNSUBSCRIBE) == [] and one.listens.empty()
        expected = [] if is_modern else ["b://b", "t://x/1"]
        assert other.asked(SUBSCRIBE) == expected
        assert other.asked(UNSUBSCRIBE) == expected[:1]
        for library in (one, other):
            assert "c://secret" not in str(library.heard)
            assert library.asked("resources/read") == []
    done = [(read.method, read.server, read.name, how) for read, how in world.records.reads]
    assert done == [(SUBSCRIBE, "s1", uri, "done") for uri in ("b://b", "t://x/1")]


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_session_subscribes_at_any_worker(redis: Redis, is_modern: bool) -> None:
    """Its stream is at another, which hears what its server says then."""
    one, other = two(is_modern)
    async with world_of(redis, one, other) as world:
        first = world.client.bridge
        info = {"name": "t", "version": "1"}
        second = Bridge(first._servers, redis, KEYS, info=info, guard=world.guard)
        await second.start()
        try:
            opened, who = await world.session(), caller_of("alice")
            endpoint, elsewhere = (each.endpoint(who.org_id) for each in (first, second))
            assert endpoint is not None and elsewhere is not None
            session = await first.legacy.find(who, endpoint, opened.id)
            stream = await first.legacy.streams.listen(endpoint, session)
            await stream.next()  # where it begins
            await until(one)
            await until(other)
            found = await second.legacy.find(who, elsewhere, opened.id)
            message = {"jsonrpc": "2.0", "id": 1, "method": SUBSCRIBE, "params": {"uri": "b://b"}}
            asked = second.legacy.begin(elsewhere, found, message)
            assert await asked.next() is None
            assert asked.answer is not None and asked.answer["result"] == {}
            if is_modern:
                await until(other, "b://b")
            other.say(updated("b://b"))
            heard = await stream.next()
            assert heard is not None and b"b://b" in heard
            first.legacy.streams.stop(session, stream)
        finally:
            await second.close()
    assert one.asked(SUBSCRIBE) == []


@pytest.mark.parametrize("is_modern", [True, False])
async def test_what_the_rules_deny_is_not_subscribed_to(redis: Redis, is_modern: bool) -> None:
    one, other = two(is_modern)
    async with world_of(redis, one, other) as world:
        world.rule(ALL, deny("s1__b:*"))
        session = await world.session()
        refused = await session.ask(URL, SUBSCRIBE, {"uri": "b://b"})
        assert refused["error"]["code"] == DENIED
        assert other.asked(SUBSCRIBE) == []
        async with world.listening("a://a", "b://b", "t://x/1", "c://secret") as told:
            granted = (await told.get())["params"]["notifications"]
            assert granted["resourceSubscriptions"] == ["a://a", "t://x/1"]
            if is_modern:
                await until(one, "a://a")
                await until(other, "t://x/1")
            else:
                assert (one.asked(SUBSCRIBE), other.asked(SUBSCRIBE)) == (["a://a"], ["t://x/1"])
    denied = [(each.method, each.server, each.name) for each in world.records.denials]
    assert denied == [(SUBSCRIBE, "s1", "b://b"), ("subscriptions/listen", "s1", "b://b")]
    assert not any("secret" in str(library.heard) for library in (one, other))


async def test_of_what_the_rules_deny_since_a_session_is_not_told(redis: Redis) -> None:
    """Nor of what is another server's."""
    one, other = two(False)
    async with world_of(redis, one, other) as world:
        session = await world.session()
        for uri in ("a://a", "b://b", "t://x/1"):
            assert "result" in await session.ask(URL, SUBSCRIBE, {"uri": uri})
        async with world.stream_of(session) as said:
            await until(other)
            world.rule(ALL, deny("s1__b:*"))
            ping = {"jsonrpc": "2.0", "id": "heard", "method": "ping"}
            other.say(updated("b://b"), updated("a://a"), updated("t://x/1"), ping)
            await other.was_heard.wait()
        told = [each for each in said if each.get("method") == RESOURCE_UPDATED]
        assert [each["params"]["uri"] for each in told] == ["t://x/1"]


@pytest.mark.parametrize("is_modern", [True, False])
async def test_of_what_the_rules_deny_since_who_listens_is_not_told(
    redis: Redis, is_modern: bool
) -> None:
    one, other = two(is_modern)
    async with world_of(redis, one, other) as world:
        async with world.listening("b://b", "t://x/1") as told:
            await told.get()
            await other.listens.get()
            world.rule(ALL, deny("s1__b:*"))
            other.say(updated("b://b"), updated("t://x/1"))
            assert (await told.get())["params"]["uri"] == "t://x/1"


async def test_a_server_that_takes_no_subscriptions_says_so(redis: Redis) -> None:
    """A client that subscribed would wait in vain."""
    mute, other = two(False)
    mute.capabilities["resources"] = {}
    async with world_of(redis, mute, other) as world:
        session = await world.session()
        refused = await session.ask(URL, SUBSCRIBE, {"uri": "a://a"})
        assert refused["error"]["code"] == -32601
        assert "'s0'" in refused["error"]["message"]
        legacy, who = world.client.bridge.legacy, caller_of("alice")
        endpoint = world.client.bridge.endpoint(who.org_id)
        assert endpoint is not None
        assert (await legacy.find(who, endpoint, session.id)).uris == {}
    assert mute.asked(SUBSCRIBE) == []


async def test_a_server_that_forgot_a_session_is_told_its_own_again(redis: Redis) -> None:
    one, other = two(False)

    def forgetful(server: Any, writer: Any, message: Any) -> bytes:
        if message["method"] == "resources/read" and one.sessions == begun:
            return b"HTTP/1.1 404 Gone\r\ncontent-length: 0\r\n\r\n"
        return one.by_method(server, writer, message)

    async with world_of(redis, one, other) as world:
        session = await world.session()
        for uri in ("a://a", "b://b"):
            assert "result" in await session.ask(URL, SUBSCRIBE, {"uri": uri})
        told, begun = len(one.asked(SUBSCRIBE)), one.sessions
        one.answer = forgetful
        assert "result" in await session.ask(URL, "resources/read", {"uri": "a://a"})
        assert one.sessions == begun + 1
    assert one.asked(SUBSCRIBE)[told:] == ["a://a"]
    assert other.asked(SUBSCRIBE) == ["b://b"]


async def test_what_no_server_lists_is_read_where_the_rules_let_it_be(redis: Redis) -> None:
    one, other = two(True)
    other.has.add("b://unlisted")
    async with world_of(redis, one, other) as world:
        params = {"uri": "b://unlisted"}
        assert "result" in await ask_modern(world.client, URL, "resources/read", params)
        world.rule(ALL, deny("s1__b:*"))
        other.calls.clear()
        refused = await ask_modern(world.client, URL, "resources/read", params)
        assert refused["error"]["data"] == params
    assert other.asked("resources/read") == []


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_client_is_served_before_its_only_server_answers(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, is_modern: bool
) -> None:
    """And hears of it once it does, which is told then what was said meanwhile."""
    monkeypatch.setattr(breaker, "FAILURES_TO_REST", 10_000)
    monkeypatch.setattr(changes, "FIRST_PAUSE_S", 0.0)
    library = Library("a://a", modern=is_modern)
    library.is_silent = True
    async with world_of(redis, library) as world:
        session = await world.session()
        assert (await session.ask(URL, "logging/setLevel", {"level": "error"}))["result"] == {}
        for method, name in (
            ("resources/list", "resources"),
            ("resources/templates/list", "resourceTemplates"),
        ):
            listed = (await session.ask(URL, method))["result"]
            assert listed[name] == [] and listed["_meta"] == {STALE_META: ["s0"]}
        async with world.listening("a://a") as told:
            granted = (await told.get())["params"]["notifications"]
            assert granted == dict.fromkeys(LIST_CHANGES.values(), True)
            library.is_silent = False
            await until(library, *["a://a"] * is_modern)
            library.say(CHANGED, updated("a://a"))
            heard = {(await told.get())["method"] for _ in range(2)}
            assert heard == {CHANGED["method"], RESOURCE_UPDATED}
        call = {"uri": "a://a"}
        assert "result" in await session.ask(URL, "resources/read", call)
        assert "result" in await session.ask(URL, "resources/read", call)
    levels = [each for each in library.calls if each["method"] == "logging/setLevel"]
    assert len(levels) == (not is_modern)


async def test_a_server_is_followed_whatever_goes_wrong_with_what_it_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(changes, "FIRST_PAUSE_S", 0.0)
    told: asyncio.Queue[Any] = asyncio.Queue()
    failing = iter([ValueError("a defect"), RedisError("away")])

    class Upstream:
        name = "s0"

    async def open_() -> AsyncGenerator[Any]:
        yield CHANGED

    async def take(message: Any) -> None:
        error = next(failing, None)
        if error is not None:
            raise error
        await told.put(message)

    upstream: Any = Upstream()
    following = asyncio.create_task(follow(upstream, open_, take))
    try:
        async with asyncio.timeout(120):
            assert await told.get() == CHANGED
    finally:
        await end_tasks(following)
    lost = [each for each in caplog.records if each.levelname == "WARNING"]
    assert ["s0" in each.getMessage() for each in lost] == [True, True]


async def test_a_stream_on_which_nothing_could_be_heard_ends(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client opens another."""

    async def away(*_: Any) -> None:
        raise RedisError("away")

    async with world_of(redis, Library()) as world:
        session = await world.session()
        monkeypatch.setattr(Sessions, "reload", away)
        assert (await world.client.get(URL, headers=session.headers)).status_code == 200
    assert any("stream of a session is ended" in each.getMessage() for each in caplog.records)
