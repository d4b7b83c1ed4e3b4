"""Starts a Redis that a test may stop or kill."""

from __future__ import annotations

import shutil
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from gateway.app.create import connect_redis
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import Child
from tests.scratch import make_scratch


@pytest.fixture
def own_home() -> Iterator[Home]:
    """For servers that a test may kill."""
    home = Home(make_scratch())
    home.create()
    yield home
    shutil.rmtree(home.root)


@pytest.fixture
async def own_redis(own_home: Home) -> AsyncIterator[tuple[redis.asyncio.Redis, Child]]:
    child = await embedded.start_redis(own_home, durable=False)
    store = connect_redis(embedded.redis_url(own_home))
    yield store, child
    await store.aclose()
    child.send_signal(signal.SIGCONT)
    await child.stop(5)
