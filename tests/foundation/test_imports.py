"""Imports without the collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from foundation.imports import importing


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_inside_and_what_was_made_there_is_never_looked_through() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
