"""Servers that are processes, behind two workers: one process for each tenant and credential,
wherever it is asked from; and what becomes of calls when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis.asyncio

from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import Bridge
from mcp_bridge.server.http import HttpEndpoint
from mcp_bridge.upstream.credentials import CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.stdio.isolation import Isolation, NoIsolation
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.upstream import ServerConfig
from tests.budget import cycles
from tests.mcp_bridge.attacks.hostile import PUBLIC_URL, caller_of
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import KEYS
from tests.mcp_bridge.upstream.stdio.servers import children

SERVER = """
import json, os, sys

def tell(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def text(said, **more):
    return {"content": [{"type": "text", "text": said}], **more}

def call(id, name, arguments, token):
    if name == "about":
        told = {"pid": str(os.getpid()), "token": os.environ.get("TOKEN", "none")}
        tell(id=id, result=text(json.dumps(told), structuredContent=told))
    elif name == "echo":
        said = arguments["text"]
        nobodys = {"io.modelcontextprotocol/subscriptionId": "9" * 5000}
        tell(method="notifications/message", params={"_meta": nobodys, "data": "?"})
        params = {"progressToken": token, "progress": 1, "message": said}
        tell(method="notifications/progress", params=params)
        tell(id=id, result=text(said))
    elif name == "hang":
        open(os.environ["MARK"] + "." + str(os.getpid()), "w").close()
    elif name == "crash":
        os._exit(3)

about = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo":
         {"name": "s", "version": "1"}}
for line in sys.stdin:
    message = json.loads(line)
    method, id, params = message.get("method"), message.get("id"), message.get("params", {})
    if method == "initialize":
        tell(id=id, result=about)
    elif method == "tools/list":
        names = ("about", "echo", "hang", "crash")
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        tell(id=id, result={"tools": tools})
    elif method == "tools/call":
        token = params.get("_meta", {}).get("progressToken")
        call(id, params["name"], params.get("arguments", {}), token)
    elif id is not None:
        tell(id=id, error={"code": -32601, "message": "no such method"})
"""


SMALL = """
info='"serverInfo":{"name":"s","version":"1"}'
while read -r line; do
  id=${line#*'"id":'}; id=${id%%[!0-9]*}
  case $line in
  *'"method":"initialize"'*)
    said='{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},'$info'}';;
  *'"method":"tools/call"'*) said='{"content":[],"structuredContent":{"pid":"'$$'"}}';;
  *'"id":'*)
    echo '{"jsonrpc":"2.0","id":'$id',"error":{"code":-32601,"message":"none"}}'; continue;;
  *) continue;;
  esac
  echo '{"jsonrpc":"2.0","id":'$id',"result":'$said'}'
done
"""
"""A server that starts in a moment, for there are a thousand of it."""
OWNER = """
import asyncio, sys
from pathlib import Path
from redis.asyncio import Redis
from tests.mcp_bridge.upstream.transports.test_channel_owners import World

async def main():
    async with World(Path(sys.argv[1]), Redis.from_url(sys.argv[2])).worker() as worker:
        print((await worker.about())["pid"], flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
CYCLES, TENANTS = cycles(1000, daily=96), 8


class Held:
    """Credentials of a test: by tenant and user."""

    def __init__(self) -> None:
        self.sets: dict[UpstreamOwner, CredentialSet] = {}

    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        own = self.sets.get(owner) or self.sets.get(UpstreamOwner(owner.org_id))
        return own or CredentialSet(f"none-{owner.org_id}", {"TOKEN": "none"})


class Worker(httpx.AsyncClient):
    def __init__(self, bridge: Bridge) -> None:
        endpoint, allowed = HttpEndpoint(bridge), AllowedOrigins(public_url=PUBLIC_URL)

        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
            who = caller_of(headers.get("x-caller", b"alice").decode())
            who = msgspec.structs.replace(who, user_id=who.subject)
            await endpoint.serve(who, None, allowed, (), scope, receive, send)

        super().__init__(transport=httpx.ASGITransport(app=asgi), base_url=PUBLIC_URL)
        self.bridge = bridge

    async def tool(self, name: str, caller: str = "alice", **arguments: Any) -> Any:
        call = {"name": name, "arguments": arguments}
        return await ask_modern(self, "/mcp", "tools/call", call, caller=caller)

    async def about(self, caller: str = "alice") -> dict[str, str]:
        found = await self.tool("about", caller)
        told: dict[str, str] = found["result"]["structuredContent"]
        return told


class World:
    def __init__(self, folder: Path, store: redis.asyncio.Redis) -> None:
        self.held, self.folder, self._store = Held(), folder, store
        self.isolation: Callable[[], Isolation] = NoIsolation
        self.spec = LaunchSpec(
            name="s",
            command=sys.executable,
            args=("-c", SERVER),
            environment={"MARK": str(folder / "hung")},
            credential_names=("TOKEN",),
        )

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        config = ServerConfig(
            name="s",
            namespace="identity",
            transport="stdio",
            launch=self.spec,
            credential="user",
        )
        transports = Transports(
            credentials=self.held,
            launcher=lambda: Launcher(self.isolation(), self.folder / "scratch"),
        )
        info = {"name": "t", "version": "1"}
        bridge = Bridge([config], self._store, KEYS, info=info, transports=transports)
        await bridge.start()
        try:
            async with Worker(bridge) as client:
                yield client
        finally:
            await bridge.close()

    async def hung(self) -> None:
        """Until a call hangs in the server."""
        while not list(self.folder.glob("hung.*")):
            await asyncio.sleep(0.01)


@pytest.fixture
def world(tmp_path: Path, redis: redis.asyncio.Redis) -> World:
    return World(tmp_path, redis)


async def test_a_process_is_one_tenants_wherever_it_is_asked_from(world: World) -> None:
    """One for each credential; another tenant, and a user's own credential, have others."""
    world.held.sets[UpstreamOwner("org_alice", "carol")] = CredentialSet("carols", {"TOKEN": "c"})
    async with world.worker() as first, world.worker() as second:
        mine = await first.about()
        assert await second.about() == mine
        assert await second.about("dave@alice") == mine
        theirs = await second.about("bob")
        assert theirs["pid"] != mine["pid"]
        carols = await first.about("carol@alice")
        assert carols["token"] == "c" and carols["pid"] not in (mine["pid"], theirs["pid"])
        assert await second.about("carol@alice") == carols
    for pid in (mine["pid"], theirs["pid"], carols["pid"]):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_answers_do_not_cross(world: World) -> None:
    """Clients that number their requests alike, at two workers, over one process."""
    async with world.worker() as first, world.worker() as second:
        sessions = [
            await LegacyClient.open(worker, "/mcp", caller=f"u{number}@alice")
            for number in range(4)
            for worker in (first, second)
        ]

        async def ask(number: int) -> None:
            params = {
                "name": "echo",
                "arguments": {"text": f"text {number}"},
                "_meta": {"progressToken": 7},
            }
            session = sessions[number % len(sessions)]
            async with session.stream("/mcp", "tools/call", params, id=1 + number) as events:
                async for _, message in events:
                    if message is None:
                        continue
                    if message.get("method") == "notifications/progress":
                        assert message["params"]["progressToken"] == 7
                        assert message["params"]["message"] == f"text {number}"
                    elif "result" in message:
                        assert message["id"] == 1 + number
                        assert message["result"]["content"][0]["text"] == f"text {number}"
                        return
            raise AssertionError("no answer")

        await asyncio.gather(*(ask(number) for number in range(40)))


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_process_that_dies_fails_its_calls_and_is_started_again(
    world: World, elsewhere: bool
) -> None:
    async with world.worker() as first, world.worker() as second:
        before = await first.about()
        asking = second if elsewhere else first
        waiting = asyncio.create_task(asking.tool("hang"))
        await world.hung()
        os.kill(int(before["pid"]), signal.SIGKILL)
        failed = await waiting
        assert failed["error"]["data"] == {"server": "s", "reason": "upstream_ended"}
        after = await asking.about()
        assert after["pid"] != before["pid"]
        assert len(list(world.folder.glob("hung.*"))) == 1, "the call was made once"


async def test_a_worker_that_goes_leaves_its_servers_to_another(world: World) -> None:
    """Sessions go on at a process of the other worker's."""
    async with world.worker() as second:
        async with world.worker() as first:
            session = await LegacyClient.open(first, "/mcp")
            assert "result" in await session.ask("/mcp", "tools/call", {"name": "about"})
            before = await second.about()
            waiting = asyncio.create_task(second.tool("hang"))
            await world.hung()
        failed = await waiting
        assert "error" in failed
        session.http = second
        found = await session.ask("/mcp", "tools/call", {"name": "about"}, id=2)
        after = found["result"]["structuredContent"]
        assert after["pid"] != before["pid"]
        assert (await second.about()) == after
        assert len(list(world.folder.glob("hung.*"))) == 1, "the call was made once"


async def test_one_that_crashes_rests(world: World) -> None:
    async with world.worker() as worker:
        reasons = []
        for _ in range(4):
            found = await worker.tool("crash")
            reasons.append(found["error"]["data"]["reason"])
        assert reasons[0] == "upstream_ended" and reasons[-1] == "resting", reasons


async def test_a_new_credential_is_a_new_process(world: World) -> None:
    async with world.worker() as first, world.worker() as second:
        old = await first.about()
        world.held.sets[UpstreamOwner("org_alice")] = CredentialSet("v2", {"TOKEN": "second"})
        new = await second.about()
        assert new["token"] == "second" and new["pid"] != old["pid"]
        async with asyncio.timeout(60):
            while is_running(int(old["pid"])):
                await asyncio.sleep(0.05)


async def test_kill_9_of_an_owner_fails_the_call_that_waits_there(
    world: World, redis: redis.asyncio.Redis
) -> None:
    """By name, in the worker that made it; it is not made again, and the server dies with its
    worker."""
    where = redis.connection_pool.connection_kwargs
    url = f"unix://{where['path']}?db={where['db']}"
    command = (sys.executable, "-W", "ignore", "-c", OWNER, str(world.folder), url)
    owner = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    try:
        assert owner.stdout is not None
        pid = int(await owner.stdout.readline())
        async with world.worker() as other:
            assert (await other.about())["pid"] == str(pid), "it is asked at its owner"
            waiting = asyncio.create_task(other.tool("hang"))
            await world.hung()
            owner.kill()
            failed = await waiting
            assert failed["error"]["data"] == {"reason": "owner_gone"}
            while is_running(pid):
                await asyncio.sleep(0.01)
            assert (await other.about())["pid"] != str(pid)
            assert len(list(world.folder.glob("hung.*"))) == 1, "the call was made once"
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()


@pytest.mark.slow
async def test_a_thousand_ends_of_servers_leave_no_orphan(
    world: World, redis: redis.asyncio.Redis
) -> None:
    """Eight tenants' servers are asked by two workers in turn: a process is the other worker's as
    often as not. All are killed but the last ones, which end with their worker."""
    world.spec = msgspec.structs.replace(world.spec, command="/bin/sh", args=("-c", SMALL))
    before, pids = children(), set[int]()
    async with world.worker() as first, world.worker() as second:

        async def cycle(tenant: str) -> None:
            for number in range(CYCLES // TENANTS):
                asked = (first, second)[number % 2]
                found = await asked.tool("about", tenant)
                while "error" in found:  # the one that was killed, not gone when it was asked
                    assert found["error"]["data"]["reason"] in ("upstream_ended", "resting"), found
                    await asyncio.sleep(0.01)
                    found = await asked.tool("about", tenant)
                pid = int(found["result"]["structuredContent"]["pid"])
                pids.add(pid)
                if number + 1 < CYCLES // TENANTS:
                    os.kill(pid, signal.SIGKILL)

        await asyncio.gather(*(cycle(f"t{number}") for number in range(TENANTS)))
    assert len(pids) > CYCLES * 0.9, "a number may come again"
    assert children() == before
    kept = {each.name for each in (world.folder / "scratch").iterdir()}
    assert kept <= {"caches"}, "packages are kept between starts, and nothing else"
    assert not await redis.keys("mcp:*:owner:*")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
