"""Databases that a release before left: each with an older schema, and for one test alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest

from migrations.releases import last_release
from migrations.runner import migrate
from tests.databases import Databases

TEMPLATE = "template_of_last_release"


class OldDatabases:
    """Those with the schema of the last release, without rows but what migrations made."""

    def __init__(self, databases: Databases) -> None:
        self._databases, self._numbers = databases, count(1)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[str]:
        """Yield the URL of a new one."""
        name = f"of_last_release_{next(self._numbers)}"
        await self._databases.create(name, TEMPLATE)
        yield self._databases.url(name)
        await self._databases.drop(name)


@pytest.fixture(scope="session")
def old_databases(databases: Databases) -> OldDatabases:
    async def make() -> None:
        await databases.create(TEMPLATE, "template0")
        await migrate(databases.url(TEMPLATE), revision=last_release().revision)

    asyncio.run(make())
    return OldDatabases(databases)


@pytest.fixture
async def old_url(old_databases: OldDatabases) -> AsyncIterator[str]:
    """A database of this test alone with the schema of the last release."""
    async with old_databases.lend() as url:
        yield url
