"""Makes a copy of the product with something added, and runs it: how a test shows in how many
places that is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.test_tidy import ROOMS, ROOT

TIMEOUT_S = 120.0
FOLDERS = (*ROOMS, "migrations", "models", "tests")
LEFT_OUT = shutil.ignore_patterns("*.pyc.*", "*.nbi", "*.nbc")
"""Bytecode that another process is about to rename; compiled kernels, which are of their folder."""


def copy_product(
    folder: Path,
    *,
    lines: Mapping[str, Mapping[str, str]] | None = None,
    files: Mapping[str, str] | None = None,
) -> int:
    """Make a copy in `folder` and return in how many places it differs.

    `lines`: by file, and by the line that they are added before. `files`: new ones, by name. A
    folder that holds none of them is a link.
    """
    lines, files = lines or {}, files or {}
    changed = {name.partition("/")[0] for name in (*lines, *files)}
    for name in FOLDERS:
        if name in changed:
            shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
        else:
            (folder / name).symlink_to(ROOT / name)
    for name, insertions in lines.items():
        source = (folder / name).read_text()
        for before, added in insertions.items():
            assert source.count(before) == 1, f"{name}: {before}"
            source = source.replace(before, added + before)
        (folder / name).write_text(source)
    for name, text in files.items():
        assert not (folder / name).exists(), name
        (folder / name).write_text(text)
    return sum(map(len, lines.values())) + len(files)


def next_migration(name: str, text: str) -> dict[str, str]:
    """Return the file of a migration behind all others, which `text` calls `{head}`."""
    versions = "migrations/versions"
    head = max(file.name[:4] for file in (ROOT / versions).glob("[0-9]*.py"))
    return {f"{versions}/9999_{name}.py": text.replace("{head}", head)}


def run_copy(
    folder: Path, arguments: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in a copy, where the copy's modules are found before all others."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
