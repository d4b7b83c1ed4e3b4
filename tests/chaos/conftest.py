"""A whole Tollgate for one chaos test each: what one test kills, the next must not miss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import Stack, running


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with running(workers=getattr(request, "param", 1)) as started:
        yield started
