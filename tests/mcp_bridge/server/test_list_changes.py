"""A client that listens is told when what it is shown is another, and nobody else is: by the
official client, in both eras, at two workers."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from redis.asyncio import Redis

from mcp_bridge.caller import Caller
from mcp_bridge.pinning import ApprovedPins, Kind, offer_of
from mcp_bridge.routing.catalog import Catalog, changes_of
from mcp_bridge.server import list_watch
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import BadServer, Bridge
from mcp_bridge.server.http import HttpEndpoint
from mcp_bridge.server.list_watch import Watch
from mcp_bridge.trust.approvals import Approvals
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.policy import ToolRule
from mcp_bridge.trust.trust import Trust
from mcp_bridge.trust.visibility import may_name
from mcp_bridge.upstream.upstream import ServerConfig, Upstream
from tests.mcp_bridge.memory import (
    FreeMeter,
    MemoryApprovals,
    MemoryCalls,
    MemoryPins,
    MemoryRecords,
)
from tests.mcp_bridge.test_hostile import KEYS, OK, SSE, Server, whole
from tests.mcp_bridge.trust.test_trust import WEATHER

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")

TOOLS, PROMPTS, RESOURCES = "tools", "prompts", "resources"
ALL = ToolRule(id="all", effect="allow")


class Offering(Server):
    """It says nothing of what changes. `listened`: once for each who listens."""

    def __init__(self, *, modern: bool) -> None:
        super().__init__(self.by_method, modern=modern)
        self.tools: list[dict[str, Any]] = [copy.deepcopy(WEATHER)]
        self.prompts: list[dict[str, Any]] = [{"name": "greet"}]
        self.capabilities = {"tools": {}, "prompts": {}, "resources": {}}
        self.listened = asyncio.Semaphore(0)

    def by_method(self, server: Server, writer: Any, message: Any) -> bytes:
        lists = {"tools/list": {"tools": self.tools}, "prompts/list": {"prompts": self.prompts}}
        result = lists.get(message["method"], {"resources": []})
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if head.startswith("get ") or message.get("method") == "subscriptions/listen":
            writer.write(OK + SSE + b"\r\n: here\n\n")
            if self.modern:
                params: dict[str, Any] = {"notifications": {}}
                method = "notifications/subscriptions/acknowledged"
                said = {"jsonrpc": "2.0", "method": method, "params": params}
                writer.write(b"data: " + httpx2.Request("GET", "http://a", json=said).content)
                writer.write(b"\n\n")
            await writer.drain()
            self.listened.release()
            await self.left.wait()
            return
        await super().reply(writer, message, head)

    def offered(self) -> list[tuple[Kind, object]]:
        tools: list[tuple[Kind, object]] = [("tool", each) for each in self.tools]
        return [*tools, *(("prompt", each) for each in self.prompts)]


class RulesOfOrgs:
    def __init__(self) -> None:
        self.now: dict[str, Rules] = {}

    async def rules(self, org_id: str) -> Rules:
        return self.now.setdefault(org_id, Rules.of([]))


class Worker:
    def __init__(self, bridge: Bridge, url: str) -> None:
        self.bridge, self.url = bridge, url


class Listening:
    """An official client; what it was told, in the order in which it was."""

    def __init__(self, client: Client, told: asyncio.Queue[str]) -> None:
        self.client, self.told = client, told

    async def hears(self, *kinds: str) -> None:
        """These, each once, and nothing else before them."""
        found = [await self.told.get() for _ in kinds]
        assert sorted(found) == sorted(kinds)

    async def tools(self) -> list[str]:
        return [each.name for each in (await self.client.list_tools()).tools]


class World:
    """Two workers before two servers, each in a namespace of its own name."""

    def __init__(self, servers: Mapping[str, Offering], workers: list[Worker]) -> None:
        self.servers, self.workers = servers, workers
        self.configs: dict[str, ServerConfig] = {}
        self.pins, self.rules = MemoryPins(), RulesOfOrgs()
        self.stack = AsyncExitStack()

    def decided(self, org_id: str | None) -> None:
        """As the change is announced to every worker."""
        for worker in self.workers:
            worker.bridge.watches.decided(org_id)

    async def approve(self, org_id: str, server: str, *kinds: Kind) -> None:
        before = await self.pins.approved(org_id, server)
        offer = offer_of(self.servers[server].offered())
        changes = changes_of(self.configs[server], before, offer)
        wanted = [each for each in changes if each.kind in (*kinds, "launch")]
        self.pins.approve(org_id, server, wanted)
        self.decided(org_id)

    def rule(self, org_id: str, *rules: ToolRule) -> None:
        self.rules.now[org_id] = Rules.of(rules)
        self.decided(org_id)

    async def listening(self, worker: Worker, who: str, mode: Any) -> Listening:
        """`who`: the org and the namespace."""
        told: asyncio.Queue[str] = asyncio.Queue()
        ready = asyncio.Event()

        async def hear(message: Any) -> None:
            method = str(getattr(message, "method", ""))
            if mode == "legacy" and method.endswith("/list_changed"):
                await told.put(method.split("/")[1])

        async def live(found: list[Client]) -> None:
            headers = {"x-who": who}
            async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
                transport = streamable_http_client(worker.url, http_client=http)
                async with Client(transport, mode=mode, message_handler=hear) as client:
                    found.append(client)
                    if mode == "legacy":
                        ready.set()
                        await asyncio.Event().wait()
                    wanted = dict.fromkeys([f"{kind}_list_changed" for kind in KINDS], True)
                    async with client.listen(**wanted) as changes:
                        ready.set()
                        async for change in changes:
                            await told.put(KINDS_BY_NAME[type(change).__name__])

        found: list[Client] = []
        task = asyncio.create_task(live(found))
        self.stack.push_async_callback(ended, task)
        await first_of(ready, task)
        await self.servers[who.partition("/")[2]].listened.acquire()
        return Listening(found[0], told)


KINDS = (TOOLS, PROMPTS, RESOURCES)
KINDS_BY_NAME = {
    "ToolsListChanged": TOOLS,
    "PromptsListChanged": PROMPTS,
    "ResourcesListChanged": RESOURCES,
}


async def first_of(ready: asyncio.Event, task: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    if not ready.is_set():
        waiting.cancel()
        task.result()


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


@asynccontextmanager
async def served(bridge: Bridge) -> AsyncIterator[str]:
    """Its URL; callers are whom `x-who` names."""
    endpoint, allowed = HttpEndpoint(bridge), AllowedOrigins(public_url="http://localhost")

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        org_id, _, namespace = dict(scope["headers"])[b"x-who"].decode().partition("/")
        who = Caller(org_id=org_id, project_id="proj_1", subject="alice", client="key_1")
        await endpoint.serve(who, namespace, allowed, (), scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(asgi, log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            bridge.begin_drain()
            await asyncio.wait((task,))


@asynccontextmanager
async def two_workers(store: Redis, *, modern: bool) -> AsyncIterator[World]:
    servers = {name: Offering(modern=modern) for name in ("one", "two")}
    world = World(servers, [])
    async with AsyncExitStack() as stack:
        for name, server in servers.items():
            listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
            stack.callback(listener.close)
            stack.callback(server.left.set)
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/mcp"
            world.configs[name] = ServerConfig(name=name, url=url, namespace=name, recheck_s=0.0)
        for _ in range(2):
            guard = Trust(
                catalog=Catalog(world.pins),
                rules=world.rules,
                approvals=Approvals(
                    MemoryApprovals(), now_s=lambda: 0.0, new_id=str, new_nonce=str
                ),
                memory=MemoryCalls(),
                records=MemoryRecords(),
                meter=FreeMeter(),
                new_id=lambda: "id",
            )
            info = {"name": "t", "version": "1"}
            bridge = Bridge(world.configs.values(), store, KEYS, info=info, guard=guard)
            await bridge.start()
            stack.push_async_callback(guard.close)
            stack.push_async_callback(bridge.close)
            world.workers.append(Worker(bridge, await stack.enter_async_context(served(bridge))))
        await stack.enter_async_context(world.stack)
        yield world


@pytest.mark.parametrize("is_modern", [True, False])
async def test_who_listens_is_told_of_approvals_revocations_and_rules(
    redis: Redis, is_modern: bool
) -> None:
    async with asyncio.timeout(120), two_workers(redis, modern=is_modern) as world:
        for org_id in ("org_a", "org_b"):
            for server in world.servers:
                await world.approve(org_id, server)  # how they are reached
        concerned = [
            await world.listening(worker, "org_a/one", mode)
            for worker in world.workers
            for mode in ("legacy", "auto")
        ]
        others = [
            await world.listening(worker, who, mode)
            for worker, mode in zip(world.workers, ("legacy", "auto"), strict=True)
            for who in ("org_b/one", "org_a/two")
        ]
        await world.approve("org_a", "one", "tool")
        for each in concerned:
            await each.hears(TOOLS)
            assert await each.tools() == ["one__weather"]
        await world.approve("org_a", "one", "prompt")
        for each in concerned:
            await each.hears(PROMPTS)
        world.rule("org_a", ALL, ToolRule(id="no", effect="deny", tools=("one__greet",)))
        for each in concerned:
            await each.hears(PROMPTS)
        world.rule("org_a", ALL, ToolRule(id="no", effect="deny", tools=("one__file:*",)))
        for each in concerned:
            await each.hears(PROMPTS, RESOURCES)
        world.pins.kept["org_a", "one"] = ApprovedPins()
        world.decided("org_a")
        for each in concerned:
            await each.hears(TOOLS, PROMPTS, RESOURCES)
            assert await each.tools() == []

        await world.approve("org_a", "two", "prompt")
        await world.approve("org_b", "one", "prompt")
        for each in others:
            await each.hears(PROMPTS)
        assert all(each.told.empty() for each in (*concerned, *others))


@pytest.mark.parametrize("is_modern", [True, False])
async def test_who_listens_elsewhere_is_told_what_was_hidden_from_who_asked(
    redis: Redis, is_modern: bool
) -> None:
    """The server has another tool of that name now, and says nothing."""
    async with asyncio.timeout(120), two_workers(redis, modern=is_modern) as world:
        await world.approve("org_a", "one", "tool", "prompt")
        first, second = world.workers
        asking = await world.listening(first, "org_a/one", "legacy")
        assert await asking.tools() == ["one__weather"]
        elsewhere = [
            await world.listening(second, "org_a/one", mode) for mode in ("legacy", "auto")
        ]
        world.servers["one"].tools[0]["description"] = "Does something else."
        assert await asking.tools() == []
        for each in elsewhere:
            await each.hears(TOOLS)
            assert await each.tools() == [] and each.told.empty()
        world.servers["one"].tools[:] = [WEATHER]
        assert await asking.tools() == ["one__weather"]
        for each in elsewhere:
            await each.hears(TOOLS)


async def test_who_listens_is_told_what_the_stream_of_another_finds_out(redis: Redis) -> None:
    """It is looked at before anybody lists it, and is no secret of who looked."""
    async with asyncio.timeout(120), two_workers(redis, modern=False) as world:
        await world.approve("org_a", "one", "tool", "prompt")
        listening = [
            await world.listening(worker, "org_a/one", mode)
            for worker in world.workers
            for mode in ("legacy", "auto")
        ]
        world.servers["one"].tools[0]["description"] = "Does something else."
        await world.listening(world.workers[1], "org_a/one", "auto")
        for each in listening:
            await each.hears(TOOLS)


class Guard:
    """Shows what it is told to show."""

    def __init__(self) -> None:
        self.now: Any = {}
        self.looks = asyncio.Semaphore(0)

    async def list_digests(self, upstream: Any, *, passes_on: bool) -> Any:
        self.looks.release()
        found = self.now[upstream.name]
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def watch_of(guard: Guard, *names: str) -> Watch:
    class Endpoint:
        upstreams = tuple(Named(name) for name in names)

    class Reach:
        pass

    context: Any = Reach()
    context.list_digests, context.endpoint = guard.list_digests, Endpoint
    return Watch(context, asyncio.Semaphore(1))


CHANGED = {kind: f"notifications/{kind}/list_changed" for kind in KINDS}


async def test_what_could_not_be_looked_at_is_looked_at_again_and_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(list_watch, "FIRST_PAUSE_S", 0.0)
    guard, told = Guard(), asyncio.Queue[str]()
    watch = watch_of(guard, "broken", "well")
    guard.now = {"broken": {CHANGED[TOOLS]: b"1"}, "well": {CHANGED[TOOLS]: b"1"}}
    await watch.begin()
    running = asyncio.create_task(watch.run(told.put))
    try:
        guard.now = {"broken": ValueError(), "well": {CHANGED[TOOLS]: b"1", CHANGED[PROMPTS]: b"2"}}
        watch.poke()
        assert await told.get() == CHANGED[PROMPTS]
        guard.now["broken"] = {CHANGED[TOOLS]: b"2"}
        assert await told.get() == CHANGED[TOOLS]
        assert told.empty()
    finally:
        await ended(running)


async def test_what_changes_while_a_listener_begins_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody can know whether what was found is of before or of after."""
    guard, told = Guard(), asyncio.Queue[str]()
    watch = watch_of(guard, "s")

    def found() -> dict[str, bytes]:
        watch.poke()
        return dict.fromkeys(CHANGED.values(), b"1")

    guard.now = {"s": found}
    await watch.begin()
    running = asyncio.create_task(watch.run(told.put))
    try:
        assert {await told.get() for _ in CHANGED} == set(CHANGED.values())
    finally:
        await ended(running)


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*", True),
        ("s*", True),
        ("s__*", True),
        ("s__file:*", True),
        ("s__x://a", True),
        ("?__x", True),
        ("s__weather", False),
        ("t__*", False),
        ("sx*", False),
    ],
)
def test_which_rules_can_be_about_a_resource(glob: str, expected: bool) -> None:
    assert may_name(glob, "s__") == expected


async def test_who_listens_is_told_of_servers_that_go_and_come(redis: Redis) -> None:
    """Other settings replace the servers of a running bridge."""
    async with asyncio.timeout(120), two_workers(redis, modern=True) as world:
        for server in world.servers:
            await world.approve("org_a", server, "tool", "prompt")
        concerned, others = [], []
        for worker, mode in zip(world.workers, ("legacy", "auto"), strict=True):
            concerned.append(await world.listening(worker, "org_a/one", mode))
            others.append(await world.listening(worker, "org_a/two", mode))
        kept = [upstreams_of(worker, "two") for worker in world.workers]
        for worker in world.workers:
            worker.bridge.replace([world.configs["two"]])
        for each in concerned:
            await each.hears(TOOLS, PROMPTS, RESOURCES)
        for worker in world.workers:
            worker.bridge.replace(world.configs.values())
        for each in concerned:
            await each.hears(TOOLS, PROMPTS, RESOURCES)
            assert await each.tools() == ["one__weather"]
        for each in others:
            assert await each.tools() == ["two__weather"] and each.told.empty()
        assert [upstreams_of(worker, "two") for worker in world.workers] == kept
        assert all(len(found) == 1 for found in kept), "what stays the same is the same"


async def test_a_server_that_changed_is_closed_when_nobody_asks_it(redis: Redis) -> None:
    async with asyncio.timeout(120), two_workers(redis, modern=True) as world:
        bridge = world.workers[0].bridge
        held = bridge.endpoint("org_a", "one")
        assert held is not None
        moved = msgspec.structs.replace(world.configs["one"], url="http://127.0.0.1:9/mcp")
        bridge.replace([moved])
        fresh = bridge.endpoint("org_a", "one")
        assert fresh is not None and fresh.upstreams[0].config is moved
        await asyncio.sleep(0)
        assert bridge._retirement.num_waiting == 1, "it is held"
        del held
        while bridge._retirement.num_waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(BadServer):
            bridge.replace([moved, moved])
        assert bridge.servers == ("one",)


def upstreams_of(worker: Worker, name: str) -> list[Upstream]:
    found = worker.bridge._upstreams.items()
    return [upstream for (_, server), upstream in found if server == name]
