"""`bench.fleet choice`: what it costs a request to choose among engines, in processor time.

Replicas, statuses, the counts that workers share and the index are real, engines are fakes that are
never asked. All have the beginning of the prompt cached and some have more. With one replica
nothing is chosen; the prediction that a deadline wants is made all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import msgspec

from bench.fleet.goals import FleetGoal, tell
from bench.fleet.routers import gpu_cost
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import LaneStatus, ReplicaStatus
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.conductor.index_writer import KvIndexWriter
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.engine_view import EngineView
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.fleet.sent_work import SentWork
from gateway.lanes import Priority
from gateway.wire.openai.from_chat import from_openai

MODEL = Path(__file__).resolve().parents[2] / "models" / "penny"
REPLICAS = (1, 2, 8, 100)
REQUESTS = 2_000
MOST_US = 150.0
"""For two replicas."""
WORDS = 16_000
"""Some 2,000 blocks of tokens."""


class ToldEngine(FakeEngine):
    """An engine whose latest status is at hand, as that of one on a socket is."""

    def __init__(self, status: ReplicaStatus) -> None:
        super().__init__(FakeCore())
        self._latest = status

    @property
    def status(self) -> ReplicaStatus:
        return self._latest


async def microseconds(number: int, folder: Path, executor: Executor) -> float:
    """Return what ordering, choosing and counting take for a request of a model with so many
    replicas."""
    tokenizer, template = Tokenizer.load(MODEL), ChatTemplate.find(MODEL)
    threads = PrepareThreads(executor=executor)
    status = msgspec.structs.replace(
        FakeCore().status(),
        costs=gpu_cost(),
        max_model_len=65_536,
        max_step_tokens=2048,
        lanes={"interactive": LaneStatus(num_running=8, waiting_tokens=500)},
    )
    replicas, index = [], KvIndex(folder / "index")
    for at in range(number):
        view = EngineView(SentWork(folder / str(at)))
        told = msgspec.structs.replace(status, engine_id=f"engine {at}")
        view.heard(told)
        replicas.append(
            EngineReplica(
                name=f"m/{at}",
                model="m",
                client=ToldEngine(told),
                tokenizer=tokenizer,
                template=template,
                threads=threads,
                view=view,
                index=index if number > 1 else None,
            )
        )
    route = Route(model="m", kind="engine", replicas=tuple(replicas))
    fleet, priority = Fleet([route]), Priority(tenant="org")
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * WORDS}]}
    prepared = await replicas[0].prepare(from_openai(json.dumps(body).encode(), "engine"))
    write_index(folder / "index", number, prepared.payload.span_keys)
    least_s = float("inf")
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(REQUESTS // number):
            fleet.choose(route, fleet.order(route), prepared, priority).send()
        least_s = min(least_s, (time.process_time() - began_s) / (REQUESTS // number))
    for replica in replicas:
        replica.view.close()
    return 1e6 * least_s


def write_index(path: Path, number: int, keys: Sequence[int]) -> None:
    """Let all of so many engines have the beginning of a prompt, and a few of them more."""
    writer = KvIndexWriter(path)
    for at in range(number):
        most = len(keys) * (at + 1) // 8 if at < 6 else 2
        engine_id = f"engine {at}"
        writer.add(engine_id, len(keys))
        writer.store(engine_id, b"".join(key.to_bytes(8, "little") for key in keys[:most]))
    writer.told()
    writer.publish()


def main(command: str, arguments: list[str]) -> int:
    argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__).parse_args(
        arguments
    )
    found: dict[int, float] = {}
    for number in REPLICAS:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
            found[number] = asyncio.run(microseconds(number, Path(folder), executor))
        print(f"{number:4d} replicas: {found[number]:8.1f} us a request", flush=True)
    text = "microseconds to choose of two replicas"
    return tell([FleetGoal(name="G12", text=text, reached=found[2], wanted=MOST_US, at_most=True)])
