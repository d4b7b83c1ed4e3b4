"""`tollgate mcp add`: a server more in the settings file, or none and the file as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import tollgate
from gateway.settings import load

BEFORE = """# ours
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = tmp_path / "tollgate.toml"
    made.write_text(BEFORE)
    made.chmod(0o640)
    return made


def add(config: Path, *arguments: str) -> Result:
    home = str(config.parent / "home")
    return CliRunner().invoke(
        tollgate, ["mcp", "add", *arguments, "--home", home, "--config", str(config)]
    )


def test_servers_are_added_behind_what_stands_there(config: Path) -> None:
    assert add(config, "maps", "--url", "https://maps.example/mcp").exit_code == 0
    near = ("near", "--url", "http://127.0.0.1:9/mcp", "--network", "loopback", "--namespace", "n")
    assert add(config, *near).exit_code == 0
    one = add(config, "files", "--command", "/bin/true", "--arg", "--root", "--arg", 'a "b"')
    assert one.exit_code == 0, one.output
    assert config.read_text().startswith(BEFORE) and config.stat().st_mode & 0o777 == 0o640
    maps, nearby, files = load({"config": config}, {}).mcp_servers
    assert (maps.name, maps.url, maps.trust) == ("maps", "https://maps.example/mcp", "pinned")
    assert (nearby.network, nearby.namespace) == ("loopback", "n")
    assert (files.command, files.args) == ("/bin/true", ["--root", 'a "b"'])
    assert [each.name for each in config.parent.iterdir()] == ["tollgate.toml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("maps",), "--url"),
        (("maps", "--url", "https://a.example", "--command", "/bin/true"), "--url"),
        (("maps", "--url", "https://a.example", "--arg", "x"), "--url"),
        (("no name", "--url", "https://a.example/mcp"), "name"),
        (("maps", "--url", "http://a.example/mcp"), "http is for"),
        (("maps", "--url", "http://127.0.0.1/mcp"), "loopback"),
    ],
)
def test_what_cannot_be_leaves_the_file_as_it_was(
    config: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = add(config, *arguments)
    assert done.exit_code != 0 and said in done.output, done.output
    assert config.read_text() == BEFORE
    assert [each.name for each in config.parent.iterdir()] == ["tollgate.toml"]
