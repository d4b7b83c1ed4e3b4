"""`tollgate mcp doctor` of servers that are processes: why they cannot be asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]

CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[mcp.stdio]
isolation = "none"
"""
SERVER = """
[[mcp.servers]]
name = "{name}"
command = "{python}"
args = ["-c", '''{script}''']
environment = {{API_TOKEN = "canary-of-the-file"}}
"""
COMPLAINS = """
import os, sys
print("no", chr(27) + "[31m" + os.environ["API_TOKEN"] + chr(27) + "[0m", file=sys.stderr)
"""
GREETS = """
import json, sys
asked = json.loads(sys.stdin.readline())
print("I cannot go on", file=sys.stderr)
answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"supportedVersions": ["2026-07-28"],
    "capabilities": {"tools": {}}, "_meta": {}}}
print(json.dumps(answer), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def config(environ: dict[str, str], folder: Path) -> Path:
    made = folder / "servers.toml"
    scripts = {
        "status": COMPLAINS + "sys.exit(3)",
        "killed": COMPLAINS + "os.kill(os.getpid(), 9)",
        "later": GREETS + "sys.exit(4)",
    }
    made.write_text(
        CONFIG
        + "".join(
            SERVER.format(name=name, python=sys.executable, script=script)
            for name, script in scripts.items()
        )
    )
    assert invoke(environ, "migrate").exit_code == 0
    return made


def test_a_dead_process_says_how_it_ended_and_what_it_complained_of(
    environ: dict[str, str], config: Path
) -> None:
    done = invoke(environ, "mcp", "doctor", "--json", "--config", str(config))
    assert done.exit_code == 1, done.output
    rows = {row["server"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {name: row.get("ended", row) for name, row in rows.items()} == {
        "status": "status 3",
        "killed": "SIGKILL",
        "later": "status 4",
    }
    assert rows["status"]["stderr"] == rows["killed"]["stderr"] == ["no [credential]"]
    assert rows["later"]["stderr"] == ["I cannot go on"]
    assert "upstream_ended" in rows["status"]["problem"] and "canary" not in done.output
    said = invoke(environ, "mcp", "doctor", "--config", str(config)).output
    assert "ended: SIGKILL\n" in said and "stderr: no [credential]\n" in said
    assert "\x1b" not in said and "canary" not in said


def test_diff_shows_what_a_dying_server_complained_of(
    environ: dict[str, str], config: Path
) -> None:
    shown = invoke(environ, "mcp", "diff", "killed", "--config", str(config))
    assert shown.exit_code == 1, shown.output
    assert "ended: SIGKILL" in shown.output and "stderr: no [credential]" in shown.output
    assert "canary" not in shown.output
