"""One worker for the tests of a module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.fuzz.world import World, respond
from tests.gateway.routes.openapi.running import VOCAB_SIZE, running


@pytest.fixture(scope="module")
def world(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushdb()
    folder: Path = tmp_path_factory.mktemp("fuzz")
    config = EngineConfig(model=Path("fake"), max_model_len=512, num_blocks=8192)
    core = FakeCore(config, vocab_size=VOCAB_SIZE, respond=respond)
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        with running(folder, databases.url(lent.name), redis_server_url, core=core) as worker:
            found = World(worker, core, redis_server_url)
            with found.asker.http:
                yield found
    asyncio.run(databases.take_back(lent))
