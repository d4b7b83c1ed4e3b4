"""Opens the spool and the tasks of generations whose other services a test puts together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from billing.spool.spool import Spool
from foundation.tasks import TaskSet


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = await Spool.open(tmp_path / "spool")
    yield spool
    await spool.shutdown()


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSet]:
    tasks = TaskSet()
    yield tasks
    await tasks.close()
