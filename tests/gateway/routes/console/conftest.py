"""A worker whose console people are signed in at, on a socket: shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import Running


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("console")
    with fresh_worker(databases, redis_server_url, folder) as found:
        yield found
