"""One stack for all conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.world import World, populated


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with populated(tmp_path_factory.mktemp("conformance")) as made:
        yield made
