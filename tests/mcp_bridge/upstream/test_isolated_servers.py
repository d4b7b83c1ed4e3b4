"""Servers that are processes, behind a bridge that keeps them apart: what they see of the product
and of each other, and what becomes of calls where nothing keeps them apart."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from gateway.home import Home
from gateway.secret import Secret
from mcp_bridge.upstream.stdio.isolation import Bubblewrap, Isolation, OwnUid, choose_isolation
from mcp_bridge.upstream.stdio.uids import UidLeases, may_change_uid
from tests.mcp_bridge.upstream.stdio.servers import FIRST_UID, children
from tests.mcp_bridge.upstream.transports.test_channel_owners import SERVER, World

LOOK = """
    elif name == "look":
        seen = {"cwd": os.getcwd(), "uid": str(os.getuid())}
        open("mine", "w").write("kept")
        for path in arguments["paths"]:
            try:
                seen[path] = str(os.listdir(path)) if os.path.isdir(path) else open(path).read()
            except OSError as error:
                seen[path] = type(error).__name__
        tell(id=id, result=text("", structuredContent=seen))
"""
HIDDEN = ("PermissionError", "FileNotFoundError")


@pytest.fixture
def world(redis: redis.asyncio.Redis) -> Iterator[World]:
    """Make a world in a folder where every user may go through, as pytest's own folders are not."""
    folder = Path(tempfile.mkdtemp(prefix="tgapart-", dir="/tmp"))
    folder.chmod(0o711)
    made = World(folder, redis)
    before, branch = SERVER.split('    elif name == "crash":')
    script = f'{before}{LOOK.strip(chr(10))}\n    elif name == "crash":{branch}'
    made.spec = msgspec.structs.replace(made.spec, args=("-c", script))
    yield made
    shutil.rmtree(folder)


def isolation_of(name: str, folder: Path) -> Isolation:
    if name == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        return Bubblewrap()
    if not may_change_uid():
        pytest.skip("only root starts servers under another uid")
    return OwnUid(UidLeases(folder / "uids", first=FIRST_UID))


@pytest.mark.parametrize("name", ["uid", "bubblewrap"])
async def test_a_server_reads_nothing_of_ours_and_of_other_tenants(world: World, name: str) -> None:
    isolation = isolation_of(name, world.folder)
    world.isolation = lambda: isolation
    home = Home(world.folder / "home")
    home.create()
    Secret.load_or_create(home.secret)
    ours = [str(home.root), str(home.secret), f"/proc/{os.getpid()}/environ"]
    async with world.worker() as worker:

        async def look(caller: str, *paths: str) -> dict[str, str]:
            found = await worker.tool("look", caller, paths=paths)
            seen: dict[str, str] = found["result"]["structuredContent"]
            return seen

        mine = await look("alice", *ours)
        assert [mine[path] in HIDDEN for path in ours] == [True] * 3, mine
        theirs = f"{mine['cwd']}/mine"
        bobs = await look("bob", mine["cwd"], theirs)
        assert bobs["cwd"] != mine["cwd"]
        assert bobs[mine["cwd"]] in HIDDEN and bobs[theirs] in HIDDEN, bobs
        assert (await look("alice", theirs))[theirs] == "kept", "each has its own"
        assert (bobs["uid"] != mine["uid"]) == (name == "uid")


@pytest.mark.parametrize("name", ["auto", "bubblewrap"])
async def test_where_nothing_keeps_them_apart_nothing_is_started(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails by name, and no more is asked of the machine than whether it could."""
    monkeypatch.setattr("mcp_bridge.upstream.stdio.isolation.may_change_uid", lambda: False)
    monkeypatch.setenv("PATH", str(world.folder))
    world.isolation = lambda: choose_isolation(name, world.folder / "uids")  # type: ignore[arg-type]
    before = children()
    async with world.worker() as worker:
        failed = await worker.tool("about")
        assert failed["error"]["data"] == {"server": "s", "reason": "cannot_isolate"}
        assert children() == before
