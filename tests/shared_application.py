"""Lets one application serve many tests, on one event loop, that of the session.

A test that is given it, and each asynchronous fixture beside it, runs on this loop. It stands still
while tests with loops of their own run, so what an application knows is old when it goes on: tests
of how long it may be have an application of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import redis.asyncio

from tests.databases import Databases

START_TIMEOUT_S = 30.0
T = TypeVar("T")
on_one_loop = partial(pytest_asyncio.fixture, loop_scope="session")


def run_on_one_loop(items: Iterable[pytest.Item], folder: Path, fixture: str) -> None:
    """Run all tests of `folder` that ask for `fixture` on the session's loop."""
    for item in items:
        if folder in item.path.parents and fixture in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@asynccontextmanager
async def in_one_task(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave `context` in one task, as a lifespan must be: a fixture begins in one and
    ends in another."""
    ready, done = asyncio.Future[T](), asyncio.Event()

    async def live() -> None:
        async with context as opened:
            ready.set_result(opened)
            await done.wait()

    life = asyncio.create_task(live())
    either: set[asyncio.Future[Any]] = {life, ready}
    await asyncio.wait(either, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        life.result()
    yield ready.result()
    done.set()
    await life


@asynccontextmanager
async def stores_of_its_own(databases: Databases, redis_url: str) -> AsyncIterator[tuple[str, str]]:
    """URLs of a Postgres and of a Redis that no test empties."""
    lent = await databases.lend()
    assert "db=0" in redis_url
    of_its_own = redis_url.replace("db=0", "db=1")
    client = redis.asyncio.from_url(of_its_own)
    await client.flushdb()
    await client.aclose()
    yield databases.url(lent.name), of_its_own
    await databases.take_back(lent)
