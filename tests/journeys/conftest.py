"""One whole Tollgate for the journeys of a module, started the way `make run` starts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack, running


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(workers=2) as started:
        yield started
