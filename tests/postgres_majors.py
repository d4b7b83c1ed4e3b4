"""Lets this process start the oldest Postgres that is supported, in place of the embedded one.

The embedded one's wheel has both. `SUITE_POSTGRES=16` does so for all tests of a run whose Postgres
is this process's own; a Tollgate that a test starts embeds the newest and refuses data of another.
"""

from __future__ import annotations

import os

import pytest

from gateway.processes import embedded_databases as embedded
from migrations.runner import POSTGRES_MAJORS

OLDEST, NEWEST = map(str, POSTGRES_MAJORS)
WANTED = os.environ.get("SUITE_POSTGRES", NEWEST)
PLAIN_LOCALE = ("--locale=C",)
"""The builtin provider came with 17; by this one text has the same order."""


def use_oldest(patch: pytest.MonkeyPatch) -> None:
    newest = embedded.postgres_bin()
    folder = newest.parents[1] / "pginstall" / "bin"
    patch.setattr(embedded, "POSTGRES_MAJOR", OLDEST)
    patch.setattr(embedded, "LOCALE", PLAIN_LOCALE)
    patch.setattr(embedded, "postgres_bin", lambda: folder)
