"""One worker for the tests of a module that ask it over HTTP, and a store of objects for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis as redis_client
from openai import OpenAI
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.databases import Databases
from tests.gateway.batches.object_store import ACCESS_KEY, SECRET_KEY, HeldRoad, ObjectStore
from tests.gateway.batches.world import World, open_world
from tests.gateway.office import ScriptedReplica
from tests.gateway.routes.openapi.running import Running, running


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with lent_worker(databases, redis_server_url, tmp_path_factory) as found:
        yield found


worker_in_rows = worker
"""By another name, for a module that has a `worker` of its own."""


@pytest.fixture(scope="module")
def worker_with_store(
    databases: Databases,
    redis_server_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    object_store: ObjectStore,
) -> Iterator[tuple[Running, HeldRoad]]:
    """Its files are on a store of objects, behind a road."""
    with HeldRoad(object_store.port) as road, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FILES_ACCESS", ACCESS_KEY)
        patch.setenv("FILES_SECRET", SECRET_KEY)
        more = FILE_STORE.format(bucket=object_store.bucket(), port=road.road.port)
        with lent_worker(databases, redis_server_url, tmp_path_factory, more) as found:
            yield found, road


FILE_STORE = """
[file_store]
bucket = "{bucket}"
endpoint = "http://127.0.0.1:{port}"
access_key_env = "FILES_ACCESS"
secret_key_env = "FILES_SECRET"
timeout_s = 2
connect_timeout_s = 1
part_bytes = 100000
"""


@contextmanager
def lent_worker(
    databases: Databases,
    redis_server_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    more: str = "",
) -> Iterator[Running]:
    lent = asyncio.run(databases.lend())
    with redis_client.from_url(redis_server_url) as store:
        store.flushdb()
    folder: Path = tmp_path_factory.mktemp("batches")
    url = databases.url(lent.name)
    with running(folder, url, redis_server_url, more=more) as found:
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
    async with open_world(db, postgres_url, redis, tmp_path, replica) as found:
        yield found
