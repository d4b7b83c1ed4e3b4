"""A home that engines without a model join over TLS on the loopback. Its relay can be ended and
begun again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.options import EngineOptions
from engine.protocol import EngineOutput, EngineRequest, EngineRole, SamplingParams
from engine.transport.client import EngineClient
from engine.transport.frames import TcpAddress
from engine.transport.join_identity import JoinIdentity
from engine.transport.join_messages import EngineIdentity
from engine.transport.joining import JoinedEntrance, folders_of, identity_of
from engine.transport.server import EngineServer
from gateway.fleet.joining.admission import JoinableModel, JoinConfig, JoinPlace
from gateway.fleet.joining.relay import Relay
from gateway.fleet.joining.tokens import JoinTokens

MODEL = "penny"
WAIT_S = 30.0
CONFIG = EngineConfig(model=Path(MODEL), max_model_len=4096, num_blocks=4096)
_numbers = count()


class JoiningEngine:
    """An engine of another machine: its folder has the token and what it keeps of its join."""

    def __init__(self, folder: Path, home: TcpAddress, identity: EngineIdentity) -> None:
        self.folder, self.home, self.identity = folder, home, identity
        self.folders: dict[str, Path] = {}
        self.joined_file = folder / "joined"
        self.core = FakeCore(CONFIG)
        self.stop = asyncio.Event()
        self.entrance: JoinedEntrance | None = None
        self.serving: asyncio.Task[None] | None = None

    def serves(self, config: EngineConfig) -> None:
        """Have it serve other files, which it sends to others where they lie in a cache."""
        self.identity = identity_of(config, self.folder / "files")
        self.folders = folders_of(config)

    async def begin(self) -> None:
        """Start as its process does. Raises: ConfigError."""
        kept = JoinIdentity(self.folder / "identity", self.folder / "token")
        self.entrance = JoinedEntrance(self.home, kept, self.identity, self.joined_file)
        self.entrance.identify(self.identity, self.folders)
        try:
            await self.entrance.ask()
        except BaseException:
            await self.entrance.close()
            raise
        server = EngineServer(self.core, self.entrance)
        self.serving = asyncio.create_task(server.serve(self.stop, drain_timeout_s=WAIT_S))

    async def vanish(self) -> None:
        """End without a word, as a process that is killed."""
        assert self.serving is not None and self.entrance is not None
        await self.entrance.close()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.core = FakeCore(CONFIG)

    async def end(self) -> None:
        self.stop.set()
        if self.serving is not None:
            await asyncio.gather(self.serving, return_exceptions=True)


class JoinableHome:
    """A home with places for engines of one model. `roles`: of each place."""

    def __init__(self, folder: Path, roles: Sequence[EngineRole] = ("both",)) -> None:
        self.folder, self.join = folder, folder / "join"
        self.join.mkdir(parents=True)
        self.model_folder = folder / "model"
        self.model_folder.mkdir()
        (self.model_folder / "config.json").write_text('{"vocab_size": 1024}')
        places = tuple(
            JoinPlace(replica=f"{MODEL}/{at}", address=f"unix:{folder}/engine-{at}.sock", role=role)
            for at, role in enumerate(roles)
        )
        self.addresses = [each.address for each in places]
        self.model = JoinableModel(
            name=MODEL,
            folders={"model": self.model_folder},
            options=EngineOptions(),
            places=places,
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = TcpAddress(*self.listener.getsockname())
        self.tokens = JoinTokens(self.join, lambda: (MODEL,))
        self.relay: Relay | None = None
        self.engines: list[JoiningEngine] = []

    async def begin(self) -> None:
        self.relay = Relay(self.join, self.config())
        await self.relay.start(self.listener.dup())

    async def end(self) -> None:
        if self.relay is not None:
            await self.relay.close()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.end()
        await self.end()
        self.listener.close()

    def config(self, **changes: object) -> JoinConfig:
        """Return its settings with another model."""
        return JoinConfig(models=(msgspec.structs.replace(self.model, **changes),))

    def engine(self, token: str | None = None, role: EngineRole = "both") -> JoiningEngine:
        """Prepare an engine with a token; None: a fresh one of this home."""
        folder = self.folder / f"box-{len(self.engines)}"
        folder.mkdir()
        if token is None:
            stored, token = self.tokens.draw(MODEL, uses=1, expires_in_s=3600)
            self.tokens.keep(stored)
        (folder / "token").write_text(token + "\n")
        config = msgspec.structs.replace(CONFIG, model=self.model_folder, served_name=MODEL)
        engine = JoiningEngine(folder, self.address, identity_of(config, folder / "files", role))
        self.engines.append(engine)
        return engine


def request(max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{next(_numbers)}",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
    )


async def generate(client: EngineClient, max_tokens: int = 3) -> list[int]:
    """Return the tokens of a whole answer."""
    return await rest_of(client.generate(request(max_tokens)))


async def rest_of(stream: AsyncIterator[EngineOutput]) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)
