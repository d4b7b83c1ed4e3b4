"""`tollgate mcp add` pins what is run, and only `approve --launch` takes another one."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import Result

from gateway.cli.mcp.launch import launched
from gateway.settings.edit import to_toml
from tests.gateway.cli.test_main import environ, folder, invoke
from tests.mcp_bridge.upstream.stdio.servers import SDK_SERVER

__all__ = ["environ", "folder"]

CONFIG = """[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[mcp.stdio]
isolation = "none"
"""
IMAGE = "acme/server@sha256:" + "a" * 64


class World:
    """An installation, and a folder of programs on its PATH."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self.environ, self.programs = environ, folder / "bin"
        self.programs.mkdir()
        environ["PATH"] = f"{self.programs}:/usr/bin:/bin"
        self.config = folder / "servers.toml"
        self.config.write_text(CONFIG)

    def program(self, name: str, content: str) -> Path:
        made = self.programs / name
        made.write_text(content)
        made.chmod(0o755)
        return made

    def mcp(self, *arguments: str) -> Result:
        return invoke(self.environ, "mcp", *arguments, "--config", str(self.config))

    def launched(self, *command: str, may_drift: bool = False) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", self.environ["PATH"])
            return launched("x", command[0], command[1:], may_drift=may_drift)


@pytest.fixture
def world(environ: dict[str, str], folder: Path) -> World:
    return World(environ, folder)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_a_command_is_now_is_written_down(world: World) -> None:
    """By its name it is what is found here; of an interpreter what it runs, too."""
    tool, script = world.program("mcp-files", "#!/bin/sh\n"), world.program("server.js", "1\n")
    node = world.program("node", "#!/bin/sh\n")
    (world.programs / "link").symlink_to(tool)
    files = world.launched("mcp-files", "/srv")
    linked = world.launched(str(world.programs / "link"))
    scripted = world.launched("node", "--quiet", str(script))
    file = {"kind": "file", "path": str(tool), "sha256": sha(tool)}
    assert files == {"command": str(tool), "args": ["/srv"], "digests": [file]}
    assert linked["digests"] == [file | {"path": str(world.programs / "link")}]
    assert scripted["digests"] == [
        {"kind": "file", "path": str(each), "sha256": sha(each)} for each in (node, script)
    ]


def test_packages_and_images_are_exact_or_said_to_drift(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("npx", "docker"):
        world.program(name, "#!/bin/sh\n")
    box = ("docker", "run", "-i")
    for command, how in (
        (("npx", "-y", "server"), "exact version"),
        ((*box, "acme/server:1"), "sha256"),
    ):
        with pytest.raises(ClickException, match=f"{how}.*--unpinned"):
            world.launched(*command)
    assert {"kind": "image", "reference": IMAGE} in world.launched(*box, IMAGE)["digests"]
    world.launched("npx", "-y", "server@1.2.3")
    world.launched(*box, "acme/server:1", may_drift=True)
    assert "Warning: acme/server:1" in capsys.readouterr().err


@pytest.mark.parametrize("executable", ["nowhere", "/nowhere/at-all"])
def test_what_is_not_there_is_not_added(world: World, executable: str) -> None:
    with pytest.raises(ClickException, match="no file here that can be run"):
        world.launched(executable)


def test_a_changed_executable_is_not_started_before_it_is_approved(world: World) -> None:
    script = f"#!{sys.executable}\n{SDK_SERVER}"
    tool = world.program("mcp-files", script)
    assert invoke(world.environ, "migrate").exit_code == 0
    (digest,) = world.launched(str(tool))["digests"]
    with world.config.open("a") as file:
        file.write(f'[[mcp.servers]]\nname = "files"\ncommand = "{tool}"\n')
        file.write(f"digests = {to_toml([digest])}\n# the last word\n")
    approved = world.mcp("approve", "files", "--all")
    assert approved.exit_code == 0 and "new       launch" in approved.output, approved.output
    before, ran = sha(tool), world.programs / "ran"
    tool.write_text(script.replace("import os", f"open({str(ran)!r}, 'w')\nimport os"))
    for command in (("diff", "files"), ("approve", "files", "--all")):
        refused = world.mcp(*command)
        assert refused.exit_code == 1 and not ran.exists()
        assert f"files: {tool} is not what was pinned" in refused.output, refused.output
        assert "`tollgate mcp approve files --launch`" in refused.output
    (row,) = map(json.loads, world.mcp("list", "--json").stdout.splitlines())
    assert row["problem"] == "no answer" and not ran.exists()
    taken = world.mcp("approve", "files", "--launch")
    assert taken.exit_code == 0, taken.output
    assert f"{tool}: {before} -> {sha(tool)}" in taken.output
    assert taken.output.endswith("1 approved.\n") and ran.exists()
    assert world.config.read_text().endswith("# the last word\n")
    (row,) = map(json.loads, world.mcp("doctor", "--json").stdout.splitlines())
    assert row["problem"] is None and row["waiting"] == 0
    assert world.mcp("approve", "files", "--launch", "--revoke").exit_code == 2
