"""A whole Tollgate for one chaos test each: what one test kills, the next must not miss."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="tgc-", dir="/tmp"))
    running = Stack(folder / "home", workers=getattr(request, "param", 1))
    try:
        yield running.start()
        running.stop()
    finally:
        running.clean_up()
        shutil.rmtree(folder, ignore_errors=True)
