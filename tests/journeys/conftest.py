"""One whole Tollgate for the journeys of a module, started the way `make run` starts it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="tgj-", dir="/tmp"))
    running = Stack(folder / "home", workers=2)
    try:
        yield running.start()
        running.stop()
    finally:
        running.clean_up()
        shutil.rmtree(folder, ignore_errors=True)
