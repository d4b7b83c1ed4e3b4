"""Models come, change and go while requests use them: nothing is closed in use, all of it once."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as budget
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.transport.client import EngineClient
from gateway.app import served_models
from gateway.app.served_models import ServedModels
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Route
from gateway.settings.load import Settings, load
from gateway.settings.models import ModelConfig
from tests.budget import examples

NAMES = ("a", "b", "c")
SHAPES = ("", "context_window = 9\n", "max_concurrency = 3\n", "max_concurrency = 4\n")
ENGINES = (
    'engine = "unix:/tmp/one.sock"\n',
    'engine = "unix:/tmp/two.sock"\n',
    "",
    "replicas = 2\n",
    "replicas = 3\n",
)
MAX_LOOKS = 500


class Client:
    """An engine's client that only counts how it is closed."""

    connected = True

    def __init__(self) -> None:
        self.num_closed = 0

    def start(self) -> None:
        pass

    async def wait_connected(self, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        self.num_closed += 1


class FarReplica:
    """A replica of an upstream that only counts how it is closed."""

    weight = 1

    def __init__(self, name: str) -> None:
        self.name, self.num_closed = name, 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave all that other tests have made out of the collections that the machine waits for."""
    gc.collect()
    gc.freeze()


class ModelsThatComeAndGo(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.loop = asyncio.new_event_loop()
        self.threads = PrepareThreads()
        self.clients: list[Client] = []
        self.replicas: list[FarReplica] = []
        self.held: list[Route] = []
        self.fails = False
        self.before = served_models.routes_of
        served_models.routes_of = self.routes_of  # type: ignore[assignment]
        marks = DrainMarks(Path(self.folder.name) / "drain_marks")
        index = KvIndex(Path(self.folder.name) / "kv_index")
        self.models = ServedModels(self.connect, self.threads, unheard, marks, index)

    def connect(self, name: str, address: str) -> EngineClient:
        self.clients.append(Client())
        return self.clients[-1]  # type: ignore[return-value]

    def routes_of(
        self, model: ModelConfig, settings: Settings, clients: Any, rooms: Any, **_: Any
    ) -> list[Route]:
        if self.fails:
            raise OSError("a tokenizer is not there")
        if clients:
            near: Any = tuple(FarReplica(f"near-{model.name}") for _ in clients)
            return [Route(model=model.name, kind="engine", replicas=near)]
        self.replicas.append(FarReplica(model.name))
        bounded = tuple(room for room in rooms if room is not None)
        replicas: Any = (self.replicas[-1],)
        return [Route(model=model.name, kind="upstream", replicas=replicas, rooms=bounded)]

    def read(self, wanted: dict[str, int]) -> Settings:
        text = ""
        for name, shape in wanted.items():
            text += f'[[model]]\nname = "{name}"\n'
            if shape < len(SHAPES):
                text += f'upstream = "http://h/v1"\n{SHAPES[shape]}'
            else:
                text += f'path = "models/penny"\n{ENGINES[shape - len(SHAPES)]}'
        path = Path(self.folder.name) / "tollgate.toml"
        path.write_text(text)
        return load({"home": Path(self.folder.name) / "home", "config": path}, {})

    @rule(
        wanted=st.dictionaries(
            st.sampled_from(NAMES), st.integers(0, len(SHAPES) + len(ENGINES) - 1), min_size=1
        ),
        fails=st.booleans(),
    )
    def take_up(self, wanted: dict[str, int], fails: bool) -> None:
        before, self.fails = {route.model for route in self.models.fleet.routes}, fails
        has_failed = False
        try:
            self.loop.run_until_complete(self.apply(self.read(wanted)))
        except OSError:
            has_failed = True
        now = {route.model for route in self.models.fleet.routes}
        assert now == (before if has_failed else set(wanted)) and fails >= has_failed

    async def apply(self, settings: Settings) -> None:
        self.models.swap(await self.models.prepare(settings, wait_s=1.0))

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        self.held += [route for route in self.models.fleet.routes if route.model == name]

    @rule(position=st.integers(0, 9))
    def end(self, position: int) -> None:
        if self.held:
            self.held.pop(position % len(self.held))

    @invariant()
    def nothing_in_use_is_closed_and_all_else_is(self) -> None:
        used = [*self.models.fleet.routes, *self.held]
        in_use = {id(replica) for route in used for replica in route.replicas}
        for _ in range(MAX_LOOKS):
            self.loop.run_until_complete(settled())
            if all(each.num_closed or id(each) in in_use for each in self.replicas):
                break
            gc.collect()  # a thread may hold what it made a moment longer, an error its frames
            time.sleep(0.01)
        for replica in self.replicas:
            assert replica.num_closed == (id(replica) not in in_use), replica.name
        alive = [each for each in self.clients if not each.num_closed]
        assert all(each.num_closed <= 1 for each in self.clients)
        assert Counter(map(id, alive)) == Counter(map(id, self.models._clients.values()))
        rooms = {id(room) for route in used for room in route.rooms}
        assert rooms == {id(room) for room in self.models._own_rooms._rooms.values()}
        assert all(room._slots._file >= 0 for route in used for room in route.rooms)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        self.loop.run_until_complete(self.models.close())
        assert all(each.num_closed == 1 for each in self.clients)
        assert all(each.num_closed >= 1 for each in self.replicas)
        served_models.routes_of = self.before
        self.threads.close()
        self.loop.close()
        self.folder.cleanup()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


ModelsThatComeAndGo.TestCase.settings = budget(
    max_examples=examples(200), stateful_step_count=20, deadline=None
)
TestModelsThatComeAndGo = ModelsThatComeAndGo.TestCase
