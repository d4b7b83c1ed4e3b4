"""Adds migrations behind the newest one, to a copy of the history that the runner then reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from migrations import runner
from tests.test_tidy import ROOT

MIGRATION = '''
"""One of a test.

Revision ID: {revision}
Revises: {before}
"""

from alembic import op

from migrations import online, walls

revision = "{revision}"
down_revision = "{before}"


def upgrade() -> None:
{body}
'''
FIRST = 9001
VERSIONS = ROOT / "migrations" / "versions"


def newest_revision() -> str:
    return max(file.name[:4] for file in VERSIONS.glob("[0-9]*.py"))


def add_migrations(patch: pytest.MonkeyPatch, folder: Path, *bodies: str) -> list[str]:
    """Let `migrate` find one more migration for each of `bodies`, and return their revisions.

    A body is the text of an `upgrade` that may use `op`, `online` and `walls`.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "migrations", folder / "migrations", ignore=ignored)
    before, revisions = newest_revision(), []
    for number, body in enumerate(bodies, FIRST):
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        text = MIGRATION.format(revision=number, before=before, body=lines)
        (folder / "migrations" / "versions" / f"{number}_added.py").write_text(text.lstrip())
        before = str(number)
        revisions.append(before)
    patch.setattr(runner, "SCRIPTS", folder / "migrations")
    return revisions
