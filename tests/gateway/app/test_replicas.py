"""A model of several engines under traffic: engines come, die and go, and no request fails that
was not at one that was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.options import EngineOptions
from engine.transport import usage_record
from engine.transport.client import EngineClient
from gateway.app.served_models import ServedModels
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import ANYBODYS
from gateway.home import Home
from gateway.processes import engine_set
from gateway.processes.engine_set import EngineSet, RunningEngine
from gateway.processes.restarter import Restarter
from gateway.settings.load import Settings, load
from gateway.settings.models import ModelConfig
from gateway.wire.openai.from_chat import from_openai
from tests.scratch import scratch_for_a_while

PENNY = '[[model]]\nname = "penny"\npath = "models/penny"\n'
NUM_TOKENS = 20
BODY = msgspec.json.encode(
    {
        "model": "penny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
)
CLIENTS = 4
WAIT_S = 60.0
ENGINE = """
    import asyncio, signal, sys, time
    from pathlib import Path
    from engine.fake.engine import FAKE_CONFIG, FakeCore
    from engine.transport.server import EngineServer
    from engine.transport.usage_record import UsageRecord

    class UnhurriedCore(FakeCore):
        def step(self):
            time.sleep(0.002)  # several requests are under way whenever something changes
            return super().step()

    async def serve(core, record):
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await EngineServer(core, sys.argv[1], record).serve(stop, drain_timeout_s=1)

    record = UsageRecord(Path(sys.argv[2]))
    asyncio.run(serve(UnhurriedCore(FAKE_CONFIG, vocab_size=4096), record))
    record.close()
"""


def fake_command(
    model: ModelConfig, address: str, options: EngineOptions, record: Path, settings: Settings
) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(ENGINE), address, str(record)]


class Installation:
    """The engines of a home, and one worker's models over them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / "home")
        self.home.create()
        self.engines = EngineSet(self.home)
        self.threads = PrepareThreads()
        self.marks = DrainMarks(self.home.drain_marks)
        self.models = ServedModels(
            lambda _, address: EngineClient(address),
            self.threads,
            unheard,
            self.marks,
            KvIndex(self.home.kv_index),
        )
        self.num_done = 0
        self.asked: Counter[str] = Counter()
        """The requests of each replica."""

    async def take_up(self, text: str) -> None:
        """Put a file in force as a reload does: what it wants beside what there is, then what
        nobody wants any more."""
        path = self.folder / "tollgate.toml"
        path.write_text(text)
        read = load({"config": path, "home": self.home.root}, {})
        settings = msgspec.structs.replace(read, models=self.engines.place(read.models))
        await self.engines.until_ready(await self.engines.begin(settings))
        self.models.swap(await self.models.prepare(settings, wait_s=WAIT_S))
        self.engines.watch(settings.models)
        self.engines.retire(settings.models, lambda: self.models.clients)

    async def ask(self) -> None:
        """Generate once, as a request does: it holds its route until it is done."""
        fleet = self.models.fleet
        route = fleet.routes[0]
        replicas = fleet.order(route)
        prepared = await replicas[0].prepare(from_openai(BODY, "vllm"))
        routed = fleet.choose(route, replicas, prepared, ANYBODYS)
        routed.send()
        replica = routed.replicas[0]
        self.asked[replica.name] += 1
        attempt = os.urandom(8).hex()
        async for event in replica.stream(prepared, attempt_id=attempt, cache_salt=""):
            last = event
        assert last.usage is not None and last.usage.output == NUM_TOKENS
        await replica.acknowledge(attempt)
        self.num_done += 1

    async def ask_on(self) -> None:
        while True:
            await self.ask()

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """Let clients ask on and on; within, each request has to succeed."""
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self.ask_on()) for _ in range(CLIENTS)]
            yield
            while clients:
                clients.pop().cancel()

    def running(self) -> dict[str, RunningEngine]:
        return {each.restarter.name: each for each in self.engines.all}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_all_have_worked(self) -> None:
        """Wait until each engine has generated something since now."""
        clients = self.models.engines["penny"].values()
        before = [each.status.generated_tokens for each in clients]
        await self.until(
            lambda: all(
                each.status.generated_tokens > old
                for each, old in zip(clients, before, strict=True)
            )
        )

    def conductor(self) -> Restarter | None:
        named = (each for each in self.engines.restarters if each.name == "conductor")
        return next(named, None)

    async def until_it_is_conducted(self) -> None:
        """Wait until the conductor writes, from now on, what the engines have cached."""
        since = time.time()
        index = KvIndex(self.home.kv_index)
        await self.until(lambda: time.time() - index.silent_s > since)

    async def close(self) -> None:
        await self.models.close()
        await self.engines.stop(1)
        self.threads.close()


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installation]:
    monkeypatch.setattr(engine_set, "engine_command", fake_command)
    with scratch_for_a_while() as folder:
        made = Installation(Path(folder))
        yield made
        await made.close()


async def test_engines_come_die_and_go_under_traffic(here: Installation) -> None:
    await here.take_up(PENNY)
    async with here.traffic():
        await here.take_up(PENNY + "replicas = 3\n")
        assert list(here.models.engines["penny"]) == ["penny/0", "penny/1", "penny/2"]
        await here.until_all_have_worked()
        await here.until_it_is_conducted()
        conductor = here.conductor()
        assert conductor is not None and conductor.child is not None
        conductor.child.send_signal(signal.SIGKILL)
        await here.until_all_have_worked()
        await here.until_it_is_conducted()
        assert conductor.exits == 1
    killed, client = here.running()["engine-1"], here.models.engines["penny"]["penny/1"]
    assert killed.restarter.child is not None
    before = client.status.engine_id
    killed.restarter.child.send_signal(signal.SIGKILL)
    await here.until(lambda: not client.connected)
    for _ in range(CLIENTS):
        await here.ask()  # at the others
    await here.until(lambda: client.connected and client.status.engine_id != before)
    async with here.traffic():
        await here.until_all_have_worked()
        here.marks.mark(1)
        done, asked = here.num_done, here.asked["penny/1"]
        await here.until(lambda: here.num_done > done + 2 * CLIENTS)
        assert here.asked["penny/1"] == asked
        here.marks.remove(1)
        await here.until_all_have_worked()
        await here.take_up(PENNY + "replicas = 1\n")
        await here.until(lambda: list(here.running()) == ["engine-0"])
        await here.until(lambda: here.conductor() is None)
        done = here.num_done
        await here.until(lambda: here.num_done > done + CLIENTS)
    await here.close()
    records = here.home.usage_records()["penny"]
    readings = [usage_record.read(path) for path in records]
    assert len(readings) == 3 and all(each.acknowledged.requests for each in readings)
