"""One worker for all tests of loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis
from openai import OpenAI

from gateway.settings.file import WrittenToolLoop
from gateway.tools.loop import ToolLoops
from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.routes.openapi.running import Running, running
from tests.gateway.tools.scripted import Servers, core

BOUNDS = WrittenToolLoop(max_rounds=6, max_calls_per_round=4, max_result_bytes=2000)


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushdb()
    folder: Path = tmp_path_factory.mktemp("loops")
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        url = databases.url(lent.name)
        with running(folder, url, redis_server_url, core=core()) as found:
            yield found
    asyncio.run(databases.take_back(lent))


@pytest.fixture
def servers(worker: Running) -> Servers:
    made = Servers()
    bounded(worker, made)
    return made


def bounded(worker: Running, servers: Servers, **bounds: object) -> None:
    loops = ToolLoops(toolbox=servers.toolbox, bounds=msgspec.structs.replace(BOUNDS, **bounds))
    worker.app.state.services = msgspec.structs.replace(worker.services, tool_loops=loops)


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with OpenAI(
        api_key=worker.everything,
        base_url=f"{worker.url}/v1",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client
