"""`tollgate mcp add` at a running gateway: from nothing to a tool call, in four commands, and the
settings file stays as it is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import tollgate
from gateway.home import Home
from tests.databases import with_cluster
from tests.gateway.processes.test_supervisor import UPSTREAM_ONLY, Up
from tests.mcp_bridge.upstream.stdio.servers import SDK_SERVER
from tests.scratch import make_scratch

CONFIG = UPSTREAM_ONLY + '[mcp.stdio]\nisolation = "none"\n'


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    folder: Path = make_scratch()
    up = Up(folder, CONFIG)
    with_cluster(Home(up.home))
    up.start()
    yield up
    if up.runs():
        up.end()
    shutil.rmtree(folder)


def command(up: Up, *arguments: str) -> Result:
    """Run `tollgate ARGUMENTS` for the home, in this process: imports are a second each."""
    where = ("--home", str(up.home), "--config", str(up.config))
    given = () if "--home" in arguments else where
    return CliRunner().invoke(tollgate, [*arguments, *given], prog_name="tollgate")


@pytest.mark.slow
def test_from_nothing_to_a_tool_call_in_four_commands(up: Up, tmp_path: Path) -> None:
    """The first is `tollgate up`."""
    script = tmp_path / "server.py"
    script.write_text(SDK_SERVER)
    flags = ("--home", str(up.home), "--config", str(up.config))
    program = ("--", sys.executable, str(script))
    tried = command(up, "mcp", "add", "--dry-run", "tools", *flags, *program)
    added = command(up, "mcp", "add", "tools", *flags, *program)
    assert added.exit_code == 0, added.stderr
    assert "+ mcp.servers.tools = " in added.stdout and 'args = "(not shown)"' in added.stdout
    assert "tollgate mcp approve tools --all" in added.stdout
    assert "make one that may" not in added.stdout, "the first key may call tools"
    assert tried.exit_code == 0 and "Nothing is stored." in tried.stdout, tried.stderr
    approved = command(up, "mcp", "approve", "tools", "--all")
    assert approved.exit_code == 0 and "new       tool add" in approved.stdout, approved.stderr
    called = command(up, "mcp", "call", "tools", "add", '{"a": 2, "b": 3}')
    assert called.exit_code == 0, called.stdout + called.stderr
    assert json.loads(called.stdout)["structuredContent"] == {"result": 5}
    assert up.config.read_text() == CONFIG

    script.write_text(SDK_SERVER + "# another\n")
    refused = command(up, "mcp", "diff", "tools")
    assert refused.exit_code == 1 and "is not what was pinned" in refused.stderr
    pinned = command(up, "mcp", "approve", "tools", "--launch", "--all")
    assert pinned.exit_code == 0 and "pinned so where it was added" in pinned.stdout
    again = command(up, "mcp", "add", "tools", *flags, *program)
    assert again.exit_code == 2 and "already" in again.stderr
    listed = command(up, "mcp", "list", "--json").stdout.splitlines()
    assert [json.loads(line)["server"] for line in listed] == ["tools"]
    removed = command(up, "mcp", "remove", "tools")
    assert removed.exit_code == 0 and "tools is removed." in removed.stdout, removed.stderr
    gone = command(up, "mcp", "call", "tools", "add", '{"a": 2, "b": 3}')
    assert gone.exit_code == 1
    assert up.config.read_text() == CONFIG


@pytest.mark.slow
def test_a_server_far_away_is_added_by_api(up: Up) -> None:
    added = command(up, "mcp", "add", "far", "https://mcp.example/mcp", "--credential", "user")
    assert added.exit_code == 0, added.stderr
    wrong = command(up, "mcp", "add", "near", "http://127.0.0.1:1/mcp")
    assert wrong.exit_code == 2 and "content.url" in wrong.stderr, wrong.stderr
    removed = command(up, "mcp", "remove", "far", "--dry-run")
    assert "- mcp.servers.far = " in removed.stdout and "Nothing is stored." in removed.stdout
    assert command(up, "mcp", "remove", "far").exit_code == 0


@pytest.mark.slow
def test_a_key_that_may_call_no_tools_is_told_which_one_to_make(up: Up) -> None:
    path = up.home / "credentials.json"
    before = path.read_text()
    made = command(up, "keys", "create", "--name", "old", "--scope", "inference", "--json")
    try:
        path.write_text(
            json.dumps(json.loads(before) | {"api_key": json.loads(made.stdout)["key"]})
        )
        added = command(up, "mcp", "add", "far", "https://mcp.example/mcp")
        assert "tollgate keys create --name tools" in added.stdout, added.stderr
        called = command(up, "mcp", "call", "far", "x")
        assert called.exit_code == 1 and "tollgate keys create --name tools" in called.stderr
    finally:
        path.write_text(before)
    assert command(up, "mcp", "remove", "far").exit_code == 0
