"""Engines without a model as processes that a test kills, stops and starts again, where `tollgate
up` would have them: the sockets and the records."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.options import EngineOptions
from engine.protocol import EngineOutput, EngineRequest
from engine.text.tokenizer import Tokenizer
from engine.transport.frames import TcpAddress
from engine.transport.join_identity import JoinIdentity
from engine.transport.joining import JoinedEntrance, identity_of
from engine.transport.server import EngineServer
from engine.transport.usage_record import UsageRecord
from gateway.fleet.joining.admission import JoinableModel, JoinConfig, JoinPlace, write_config
from gateway.fleet.joining.tokens import JoinTokens
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


def run_engine(entrance: str | TcpAddress, box: Path, record: Path) -> None:
    """The life of one, until it is killed. A TCP address is that of a home to join, with the token
    in `box`."""

    async def serve() -> None:
        core = UnhurriedCore(CONFIG, vocab_size=VOCAB_SIZE, respond=respond)
        way: str | JoinedEntrance
        if isinstance(entrance, TcpAddress):
            served = msgspec.structs.replace(CONFIG, model=PENNY, served_name=MODEL)
            identity = JoinIdentity(box / "identity", box / "token")
            way = JoinedEntrance(entrance, identity, identity_of(served, box / "files"))
            await way.ask()
        else:
            way = entrance
        server = EngineServer(core, way, UsageRecord(record))
        await server.serve(asyncio.Event(), drain_timeout_s=0)

    asyncio.run(serve())


class MortalRelay:
    """The process that one engine of another machine joins, as `tollgate up` runs it."""

    def __init__(self, home: Home, number: int) -> None:
        self._home = home
        place = JoinPlace(replica=f"{MODEL}/{number}", address=f"unix:{home.engine_socket(number)}")
        model = JoinableModel(
            name=MODEL, folders={"model": PENNY}, options=EngineOptions(), places=(place,)
        )
        write_config(home.join_config, JoinConfig(models=(model,)))
        self.box = home.root / "box"
        self.box.mkdir()
        tokens = JoinTokens(home.join, lambda: (MODEL,))
        stored, text = tokens.draw(MODEL, uses=1, expires_in_s=3600)
        tokens.keep(stored)
        (self.box / "token").write_text(text)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress(*self._listener.getsockname())
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        fd = self._listener.fileno()
        command = [sys.executable, "-m", "gateway", "join", "--listen-fd", str(fd)]
        command += ["--folder", str(self._home.join), "--config", str(self._home.join_config)]
        self._process = subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        self.kill()
        self._listener.close()


class MortalEngines:
    """`numbers`: of their sockets; the last one joins by a relay."""

    def __init__(self, home: Home, numbers: Sequence[int]) -> None:
        self._home, self.numbers = home, numbers
        self.relay = MortalRelay(home, numbers[-1])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[int, ForkServerProcess] = {}

    def begin(self, number: int) -> None:
        joins = number == self.numbers[-1]
        way = self.relay.address if joins else f"unix:{self._home.engine_socket(number)}"
        record = self._home.usage_record(MODEL, 1 + self.numbers.index(number))
        arguments = (way, self.relay.box, record)
        process = self._context.Process(target=run_engine, args=arguments, daemon=True)
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
        self.relay.end()
