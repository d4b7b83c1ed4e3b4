"""Runs the command blocks of a page of the docs, in their order, as a reader would paste them.

A fenced block says in its first line what it is:

- `bash`, `python`: run in a folder that holds `.tollgate`. All bash blocks of a page are one shell,
  all python blocks one interpreter, so that later blocks know the names of earlier ones.
- `toml`: settings, checked against the names and types of `tollgate.toml`.
- `file=NAME` behind any of these: written to that file instead.
- `skip=REASON` behind any of these: not run, for one of `REASONS`.
- `text`, `json` and others: shown, not run.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.tools.ports import free_port
from gateway.settings.file import SettingsFile, decode_path
from tests.stack import BIN, ROOT

DOCUMENTED = "127.0.0.1:8000"
"""Address of the gateway in the docs, in place of which the blocks use that of the test's."""
OTHER_PORT = "9000"
"""Port of a server that a page starts beside it; the blocks use one that is free."""
RUN = ("bash", "python")
SHOWN = ("text", "json", "toml", "ini", "nginx", "caddy", "yaml", "jinja")
REASONS = {
    "started": "the product runs already, started as this block would start it",
    "install": "it installs what the tests have",
    "network": "it fetches from the internet",
    "gpu": "it needs a GPU",
    "cluster": "it needs a Kubernetes cluster",
    "root": "it changes the machine",
    "domain": "it needs a domain of its own, and a certificate",
    "vendor": "it needs a program or an account of somebody else",
    "own-test": "it needs a product of its own, and a test has that",
}
TIMEOUT_S = 240.0
CELLS = Path(__file__).with_name("cells.py")
PRELUDE = """
set -euo pipefail
run_cell() {
    if [ -z "${CELLS_PID:-}" ]; then coproc CELLS { exec "$DOCS_PYTHON" "$DOCS_CELLS"; }; fi
    env -0 > .cells.env
    echo "$1" >&"${CELLS[1]}"
    read -r cell_status <&"${CELLS[0]}"
    [ "$cell_status" = done ]
}
"""
FENCE = re.compile(r"^```(\S*) *(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    options: Mapping[str, str]
    text: str

    @property
    def is_run(self) -> bool:
        is_made = self.language in RUN or "file" in self.options
        return is_made and "skip" not in self.options


def shown(page: Path) -> str:
    return os.path.relpath(page, ROOT)


def blocks_of(page: Path) -> list[Block]:
    """Raises AssertionError, which names page and line, for a block that says nothing known."""
    found: list[Block] = []
    opened: tuple[int, str, dict[str, str]] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            place = f"{shown(page)}:{number}"
            options = dict(each.partition("=")[::2] for each in fence[2].split())
            assert fence[1] in (*RUN, *SHOWN), f"{place}: a language of {RUN + SHOWN}"
            assert options.keys() <= {"file", "skip"}, f"{place}: {fence[2]}"
            assert options.get("skip", "gpu") in REASONS, f"{place}: skip={list(REASONS)}"
            opened, lines = (number, fence[1], options), []
        elif opened is not None and line == "```":
            found.append(Block(*opened, "\n".join(lines)))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise AssertionError(f"{shown(page)}:{opened[0]} has no end")
    return found


def check_settings(block: Block) -> None:
    """Raises msgspec.ValidationError for what `tollgate.toml` does not know."""
    msgspec.convert(tomllib.loads(block.text), SettingsFile, dec_hook=decode_path)


def script_of(blocks: list[Block], folder: Path, address: str) -> str:
    """One shell script of all blocks that are run. Writes the files of python blocks."""
    parts, port = [PRELUDE], str(free_port())
    for block in blocks:
        if not block.is_run:
            continue
        text = block.text.replace(DOCUMENTED, address).replace(OTHER_PORT, port)
        parts.append(f"echo '@@ line {block.line}'")
        if name := block.options.get("file"):
            parts.append(f"cat > {shlex.quote(name)} <<'END_OF_BLOCK'\n{text}\nEND_OF_BLOCK")
        elif block.language == "bash":
            parts.append(text)
        else:
            cell = folder / f".cell-{block.line}.py"
            cell.write_text(text)
            parts.append(f"run_cell {shlex.quote(str(cell))}")
    return "\n".join(parts) + "\n"


def run_page(page: Path, folder: Path, address: str, env: Mapping[str, str] | None = None) -> str:
    """Run the blocks of a page in `folder`, against the gateway at `address` (host:port), and
    return what they printed. Raises AssertionError with the page and the line of the block."""
    blocks = blocks_of(page)
    for block in blocks:
        if block.language == "toml":
            check_settings(block)
    programs = folder / ".venv" / "bin"
    if not programs.exists():
        programs.parent.mkdir(exist_ok=True)
        programs.symlink_to(BIN)
    script = folder / ".page.sh"
    script.write_text(script_of(blocks, folder, address))
    process = subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DOCS_PYTHON": sys.executable,
            "DOCS_CELLS": str(CELLS),
            **(env or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    finally:  # what the page left running, too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        at = said.rpartition("@@ line ")[2].partition("\n")[0]
        raise AssertionError(f"{shown(page)}:{at} failed\n{said[-4000:]}")
    return said
