"""Both ends of the engine's socket for its tests: cores that run when told to, peers that say what
they are told to, requests in one line."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from engine.fake.engine import FAKE_CONFIG, FakeCore, drawn
from engine.protocol import (
    EngineOutput,
    EngineRequest,
    Outputs,
    ReplicaStatus,
    SamplingParams,
    ServerMessage,
    Submit,
)
from engine.transport.client import Engine
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.server import EngineServer

Serve = Callable[..., Awaitable[EngineServer]]
Join = Callable[[EngineServer], Awaitable["Peer"]]
CONFIG = msgspec.structs.replace(
    FAKE_CONFIG, max_num_seqs=2, max_waiting=2, status_interval_s=0.02, max_orphans=3
)


SMALL = msgspec.structs.replace(FAKE_CONFIG, max_num_seqs=4, max_waiting=4, status_interval_s=0.02)
LONG = 4000
"""As max_tokens: more than `paced` gets through while a test runs."""


def paced(request: EngineRequest, index: int) -> Iterator[int]:
    """As `drawn`; a LONG request takes its time, at least 8 s."""
    for token_id in drawn(request, index):
        if request.sampling.max_tokens == LONG:
            time.sleep(0.002)
        yield token_id


def ask(
    request_id: str = "r",
    prompt: list[int] | None = None,
    n: int = 1,
    salt: str = "",
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        n=n,
        cache_salt=salt,
    )


async def collect(engine: Engine, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(request)]


def text(outputs: list[EngineOutput], index: int = 0) -> list[int]:
    return [id_ for o in outputs if o.index == index for id_ in o.token_ids]


class GatedCore(FakeCore):
    """Runs as many steps as `allow` was called for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(msgspec.structs.replace(CONFIG, **options))
        self._gate = threading.Semaphore(0)
        self.entered = 0

    def allow(self, steps: int) -> None:
        self._gate.release(steps)

    def step(self) -> list[EngineOutput]:
        self.entered += 1
        assert self._gate.acquire(timeout=30), "nobody allowed this step"
        return super().step()


class Peer:
    """A gateway that says what it is told to, and hears everything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._frames: FrameReader[ServerMessage] = FrameReader(reader, ServerMessage)
        self.status: ReplicaStatus | None = None
        self.heard: list[ServerMessage] = []

    def say(self, *messages: msgspec.Struct) -> None:
        self.writer.write(b"".join(map(encode_frame, messages)))

    async def next(self) -> ServerMessage | None:
        """The next message that is not a status; None when the engine hung up."""
        async with asyncio.timeout(30):
            while isinstance(message := await self._frames.read(), ReplicaStatus):
                self.status = message
        if message is not None:
            self.heard.append(message)
        return message

    async def until_status(self, wanted: Callable[[ReplicaStatus], bool]) -> None:
        async with asyncio.timeout(30):
            while self.status is None or not wanted(self.status):
                message = await self._frames.read()
                assert message is not None
                if isinstance(message, ReplicaStatus):
                    self.status = message
                else:
                    self.heard.append(message)

    async def last_of(self, request_id: str) -> EngineOutput:
        while True:
            message = await self.next()
            assert message is not None, "the engine hung up"
            if isinstance(message, Outputs):
                for output in message.outputs:
                    if output.request_id == request_id and output.finished:
                        return output

    def vanish(self) -> None:
        self.writer.transport.abort()


def submit(request_id: str, prompt: list[int] | None = None, n: int = 1, **sampling: Any) -> Submit:
    return Submit(ask(request_id, prompt, n, **{"max_tokens": 4, **sampling}))


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def settle() -> None:
    """Let the server read what was said: it runs on this loop and needs a few rounds of it."""
    for _ in range(20):
        await asyncio.sleep(0.002)
