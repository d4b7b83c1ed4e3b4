"""Has engines of penny run on a Ray cluster of three nodes on this machine, one of which is killed.

`make test-ray` runs it, nothing else does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.tools.ports import free_port
from engine.errors import EngineUnavailable
from engine.transport.client import EngineClient
from engine.transport.join_messages import TOKEN_PREFIX
from gateway.fleet.joining.tokens import JoinTokens
from gateway.home import Home
from gateway.processes.child_processes import Child
from gateway.processes.engine_set import EngineSet
from gateway.settings.load import load
from tests.gateway.fleet.joining.home_of_engines import generate

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

WAIT_S = 240.0
"""Ray takes some half a minute to see that a node is gone."""
STORE_BYTES = 80 * 1024 * 1024


class LocalCluster:
    """A head without processors and two nodes that have room for one engine each, on the loopback
    alone. `folder`: of Ray's files."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._options = {
            "node_ip_address": "127.0.0.1",
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": folder,
        }
        self.cluster: Any = Cluster()
        self._nodes: list[Any] = []

    def start(self) -> None:
        self.cluster.add_node(num_cpus=0, **self._options)
        for _ in range(2):
            self.add_node()

    def add_node(self) -> None:
        self._nodes.append(self.cluster.add_node(num_cpus=1, **self._options))

    def kill_first_node(self) -> None:
        """Kill one as by a loss of its power; the head does not know."""
        self.cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def logs(self) -> str:
        folder = Path(self.cluster.head_node.get_session_dir_path(), "logs")
        files = (each for each in folder.rglob("*.*") if each.is_file())
        return "".join(each.read_text(errors="replace") for each in files)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Skips where Ray is not there or does not start."""
    # Sockets lie in the folder: its path has to be short.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Else Ray takes the machine's outer address in the place of the loopback's.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        pytest.importorskip("ray", reason='Ray is not installed: pip install "tollgate[ray]"')
        started = LocalCluster(folder)
        try:
            started.start()
        except Exception as error:
            started.cluster.shutdown()
            pytest.skip(f"Ray does not start here: {' '.join(str(error).split())[:300]}")
        yield started
        started.cluster.shutdown()


class HomeOnRay:
    """A home whose engines of penny run on a cluster, with its own relay and launcher."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self.folder, self.cluster, self.port = folder, cluster, free_port()
        self.home = Home(folder / "home")
        self.home.create()
        self.tokens = JoinTokens(self.home.join, lambda: ("penny",))
        self.set = EngineSet(self.home)

    async def have(self, joined: int) -> list[str]:
        """Have so many engines on Ray, and return where they are found here."""
        (self.folder / "tollgate.toml").write_text(
            f'ray = "{self.cluster}"\n[fleet]\njoin_listen = "tcp:127.0.0.1:{self.port}"\n'
            f'[[model]]\nname = "penny"\npath = "models/penny"\nreplicas = 0\njoined = {joined}\n'
            "[model.engine_options]\nnum_blocks = 256\nmax_num_seqs = 4\n"
        )
        path = self.folder / "tollgate.toml"
        settings = load({"config": path, "home": self.home.root}, {})
        await self.set.let_join(settings)
        return list(settings.models[0].joined)

    @property
    def launcher(self) -> Child:
        [found] = [each for each in self.set.restarters if each.name == "ray"]
        assert found.child is not None
        return found.child

    def engines(self) -> dict[int, str]:
        """Return the command line of each process of an engine that joins here, by its id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_text(errors="replace").split("\0")
                if f"127.0.0.1:{self.port}" in words and "engine" in words:
                    found[int(path.parent.name)] = " ".join(words)
        return found

    def log(self) -> str:
        return (self.home.logs / "ray.log").read_text()


@pytest.fixture
async def home(tmp_path: Path, cluster: LocalCluster) -> AsyncIterator[HomeOnRay]:
    made = HomeOnRay(tmp_path, cluster.cluster.address)
    yield made
    await made.set.stop(10)


def folders() -> set[Path]:
    """Return the folders of all actors on this machine."""
    return set(Path(tempfile.gettempdir()).glob("tollgate-engine-*"))


async def answer(address: str) -> None:
    """Wait until an engine at an address answers a request."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                client = await EngineClient.connect(address, timeout_s=5)
            except EngineUnavailable:
                await asyncio.sleep(0.2)
                continue
            try:
                if len(await generate(client)) == 3:
                    return
            except EngineUnavailable:
                pass
            finally:
                await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.2)


async def test_engines_come_back_from_a_death_and_elsewhere_from_a_lost_node(
    home: HomeOnRay, cluster: LocalCluster
) -> None:
    there_before = folders()
    addresses = await home.have(2)
    await asyncio.gather(*map(answer, addresses))
    first = home.engines()
    assert len(first) == 2
    first_tokens = {each.id for each in home.tokens.all()}

    killed = min(first)
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(home.engines()) == 2 and killed not in home.engines())
    await asyncio.gather(*map(answer, addresses))
    assert {each.id for each in home.tokens.all()} == first_tokens, "its actor started it again"

    before = set(home.engines())
    cluster.add_node()
    cluster.kill_first_node()
    await until(lambda: "was lost, another one is asked for" in home.log())
    await until(lambda: len(set(home.engines()) - before) == 1 and len(home.engines()) == 2)
    await asyncio.gather(*map(answer, addresses))
    tokens = home.tokens.all()
    assert sum(each.revoked_at is not None for each in tokens) == len(tokens) - 2

    said = home.log() + "".join(home.engines().values())
    said += cluster.logs()
    assert "starts on" in said
    assert TOKEN_PREFIX not in said

    await home.set.stop(10)
    await until(lambda: not home.engines())
    assert all(each.revoked_at is not None for each in home.tokens.all())
    assert len(folders() - there_before) <= 1, "that of the lost node may be left"


async def test_what_a_dead_launcher_started_ends_and_another_one_starts_anew(
    home: HomeOnRay,
) -> None:
    [address] = await home.have(1)
    await answer(address)
    [before] = home.engines()
    home.launcher.send_signal(signal.SIGKILL)
    await until(lambda: before not in home.engines())
    await answer(address)
    await home.have(2)
    await until(lambda: len(home.engines()) == 2)
    await home.have(1)
    await until(lambda: len(home.engines()) == 1)
    await answer(address)
