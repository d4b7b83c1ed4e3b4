"""A worker with a database and an emptied Redis of its own, and MCP clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running, running


@contextmanager
def fresh_worker(
    databases: Databases, redis_url: str, folder: Path, **more: Any
) -> Iterator[Running]:
    """A worker that a busy machine does not make forget a credential. `more`: as `running`."""
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_url) as store:
        store.flushdb()
    try:
        with pytest.MonkeyPatch.context() as patch:
            be_patient(patch)
            with running(folder, databases.url(lent.name), redis_url, **more) as worker:
                yield worker
    finally:
        asyncio.run(databases.take_back(lent))


@asynccontextmanager
async def mcp_client(
    worker: Running, secret: str, mode: Any = "auto", **can: Any
) -> AsyncIterator[Client]:
    """The official one, with an API key. `can`: what it answers servers."""
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx2.AsyncClient(headers=headers, timeout=TIMEOUT_S) as http:
        transport = streamable_http_client(f"{worker.url}/mcp", http_client=http)
        async with Client(transport, mode=mode, **can) as client:
            yield client
