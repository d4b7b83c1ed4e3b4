"""Servers of both eras, and two workers of a bridge before each, once for all tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.mcp_bridge.processes import ERAS, Eras, running


@pytest.fixture(scope="session")
def bridge_redis_url() -> Iterator[str]:
    """A Valkey of their own: that of the session is emptied for tests."""
    folder = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    home = Home(folder)
    home.create()
    child = asyncio.run(embedded.start_redis(home, durable=False))
    yield embedded.redis_url(home)
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def all_eras(bridge_redis_url: str) -> Iterator[dict[str, Eras]]:
    with running(*(("fixture_server", "--era", era) for era in ERAS)) as servers:
        bridges = [
            ("plain_bridge", "--redis", bridge_redis_url, "--server", server.url)
            for server in servers
            for _ in range(2)
        ]
        with running(*bridges) as workers:
            yield {
                era: Eras(server, (workers[2 * place], workers[2 * place + 1]), bridge_redis_url)
                for place, (era, server) in enumerate(zip(ERAS, servers, strict=True))
            }


@pytest.fixture(params=ERAS)
def eras(request: pytest.FixtureRequest, all_eras: dict[str, Eras]) -> Eras:
    """For servers of either era."""
    return all_eras[request.param]


@pytest.fixture
def old(all_eras: dict[str, Eras]) -> Eras:
    return all_eras[ERAS[0]]


@pytest.fixture
def new(all_eras: dict[str, Eras]) -> Eras:
    return all_eras[ERAS[1]]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield client
