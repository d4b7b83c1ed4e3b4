"""One worker for the tests of a module that ask it over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from openai import OpenAI

from tests.databases import Databases
from tests.gateway.openapi.running import Running, running


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushall()
    folder: Path = tmp_path_factory.mktemp("batches")
    with running(folder, databases.url(lent.name), redis_server_url) as found:
        yield found
    asyncio.run(databases.take_back(lent))


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{worker.url}/v1", api_key=worker.everything, max_retries=0) as found:
        yield found
