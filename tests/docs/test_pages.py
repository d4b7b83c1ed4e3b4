"""The tutorial and the pages for operators run as they stand there; the tutorial's first page runs
by day, too (tests/journeys)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budget import NIGHT
from tests.docs.runner import RUN, blocks_of, run_page
from tests.stack import ROOT, Stack, running

TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
HOW_TO = ROOT / "docs" / "how-to"
OPERATION = [
    ROOT / "docs" / "backup.md",
    *(HOW_TO / f"{name}.md" for name in ("monitoring", "restore-drill", "hardening")),
]
"""The pages for operators; tests/gateway/backup has by day what they do with backups."""
MAX_SKIPPED = 2
"""The number of the tutorial's blocks that no test runs."""


@pytest.fixture(scope="module")
def product() -> Iterator[Stack]:
    """A product in a folder as the docs have it: settings and `.tollgate` side by side."""
    with running(".tollgate", config="port = PORT\n") as started:
        yield started


@NIGHT
def test_the_tutorial_runs_from_its_first_page_to_its_last(product: Stack) -> None:
    for page in TUTORIAL:
        run_page(page, product.home.parent, f"127.0.0.1:{product.port}")


@NIGHT
@pytest.mark.parametrize("page", OPERATION, ids=[page.stem for page in OPERATION])
def test_an_operator_follows_a_page(product: Stack, page: Path) -> None:
    run_page(page, product.home.parent, f"127.0.0.1:{product.port}")


def test_few_blocks_of_the_tutorial_are_not_run() -> None:
    blocks = [block for page in TUTORIAL for block in blocks_of(page) if block.language in RUN]
    assert sum("skip" in block.options for block in blocks) <= MAX_SKIPPED


@NIGHT
def test_the_page_on_clients_runs(product: Stack) -> None:
    page = ROOT / "docs" / "how-to" / "clients.md"
    run_page(page, product.home.parent, f"127.0.0.1:{product.port}")
