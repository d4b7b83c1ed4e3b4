"""One worker for the tests of a module that ask it over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis as redis_client
from openai import OpenAI
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.databases import Databases
from tests.gateway.batches.world import World, opened
from tests.gateway.office import ScriptedReplica
from tests.gateway.openapi.running import Running, running


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    lent = asyncio.run(databases.lend())
    with redis_client.from_url(redis_server_url) as store:
        store.flushall()
    folder: Path = tmp_path_factory.mktemp("batches")
    with running(folder, databases.url(lent.name), redis_server_url) as found:
        yield found
    asyncio.run(databases.take_back(lent))


@pytest.fixture
def client(worker: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{worker.url}/v1", api_key=worker.everything, max_retries=0) as found:
        yield found


@pytest.fixture
async def replica() -> ScriptedReplica:
    return ScriptedReplica()


@pytest.fixture
async def world(
    db: AsyncEngine, postgres_url: str, redis: Redis, tmp_path: Path, replica: ScriptedReplica
) -> AsyncIterator[World]:
    async with opened(db, postgres_url, redis, tmp_path, replica) as found:
        yield found
