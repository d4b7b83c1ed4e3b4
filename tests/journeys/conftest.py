"""One whole Tollgate, started the way `make run` starts it, for the journeys of all modules that
want no other: each of them tells what it did from what was done before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack, running


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with running(workers=2) as started:
        yield started
