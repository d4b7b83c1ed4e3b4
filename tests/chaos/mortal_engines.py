"""Engines without a model as processes that a test kills, stops and starts again, where `tollgate
up` would have them: the sockets and the records."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.protocol import EngineOutput, EngineRequest
from engine.text.tokenizer import Tokenizer
from engine.transport.server import EngineServer
from engine.transport.usage_record import UsageRecord
from gateway.home import Home

MODEL = "twin"
PENNY = Path(__file__).resolve().parents[2] / "models" / "penny"
VOCAB_SIZE = 4096
STEP_S = 0.01
A_CALL = 0
SAYS = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"city": "Zürich 😀", "days": [1, 2, 3, 4]}}'
    "\n</tool_call>",
    "Ünïcode 😀👍🏽 and\nmore: e\u0301, 日本語のテキスト, much of it no whole token.",
    "The quick brown fox jumps over the lazy dog, again and again, and then STOP here it goes on.",
    "<think>Hm, let me see: one, two, three, four, five.</think>So be it, and so it is, I say.",
)
"""The answers, by the seed's remainder."""
IDS = [Tokenizer.load(PENNY).encode(text) for text in SAYS]
CONFIG = EngineConfig(
    model=Path(MODEL), max_model_len=1024, num_blocks=8192, prefix_caching=False, max_orphans=10_000
)


def respond(request: EngineRequest, index: int) -> Iterator[int]:
    """The text that the seed names; another choice or prompt has one of the others."""
    seed = request.sampling.seed or 0
    digest = hashlib.blake2b(repr((request.prompt_token_ids, index)).encode(), digest_size=1)
    shift = 0 if index == 0 else digest.digest()[0]
    return iter(IDS[(seed + shift) % len(IDS)])


class UnhurriedCore(FakeCore):
    """Takes its time for each step, so that there is an amid."""

    def step(self) -> list[EngineOutput]:
        time.sleep(STEP_S)
        return super().step()


def run_engine(address: str, record: Path) -> None:
    """The life of one, until it is killed."""

    async def serve() -> None:
        core = UnhurriedCore(CONFIG, vocab_size=VOCAB_SIZE, respond=respond)
        server = EngineServer(core, address, UsageRecord(record))
        await server.serve(asyncio.Event(), drain_timeout_s=0)

    asyncio.run(serve())


class MortalEngines:
    """`numbers`: of their sockets."""

    def __init__(self, home: Home, numbers: range) -> None:
        self._home, self.numbers = home, numbers
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[int, ForkServerProcess] = {}

    def begin(self, number: int) -> None:
        address = f"unix:{self._home.engine_socket(number)}"
        record = self._home.usage_record(MODEL, 1 + number - self.numbers.start)
        process = self._context.Process(target=run_engine, args=(address, record), daemon=True)
        process.start()
        self._processes[number] = process

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].join()

    def signal(self, number: int, name: signal.Signals) -> None:
        pid = self._processes[number].pid
        assert pid is not None
        os.kill(pid, name)

    def end(self) -> None:
        for number in self._processes:
            self.kill(number)
