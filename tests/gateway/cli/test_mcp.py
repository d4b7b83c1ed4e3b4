"""`tollgate mcp add`: a server more in the settings file, or none and the file as it was. `tollgate
mcp diff`: what differs is printed as it is found."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner, Result

from gateway.cli.main import tollgate
from gateway.cli.mcp.offers import show_changes
from gateway.settings.edit import with_key
from gateway.settings.load import load
from mcp_bridge.pinning import Change, pin_of

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


def test_the_key_of_commands_is_no_setting() -> None:
    """`tollgate mcp call` reads it, beside the settings; its value is in none of them."""
    found = load({}, {"TOLLGATE_API_KEY": "sk-canary"})
    assert found == load({}, {}) and "sk-canary" not in repr(found)


def test_a_difference_is_printed_before_the_next_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Change("new", "tool", "first", None, pin_of("tool", {"name": "first"}))

    def found() -> Iterator[Any]:
        yield first, ()
        assert "new       tool first" in capsys.readouterr().out

    show_changes(found())


def test_servers_are_added_behind_what_stands_there(config: Path) -> None:
    maps_url = "https://maps.example/mcp"
    wary = ("--credential", "user", "--recheck-s", "0", "--era", "2025-11-25")
    assert add(config, "maps", "--url", maps_url, *wary).exit_code == 0
    assert add(config, "maps2", "--url", maps_url, "--recheck-s", "-1").exit_code == 2
    near = ("near", "--url", "http://127.0.0.1:9/mcp", "--network", "loopback", "--namespace", "n")
    assert add(config, *near).exit_code == 0
    one = add(config, "files", "--command", "/bin/true", "--arg", "--root", "--arg", 'a "b"')
    assert one.exit_code == 0, one.output
    assert config.read_text().startswith(BEFORE) and config.stat().st_mode & 0o777 == 0o640
    maps, nearby, files = load({"config": config}, {}).mcp.servers
    assert (maps.name, maps.url, maps.trust) == ("maps", "https://maps.example/mcp", "pinned")
    assert (nearby.network, nearby.namespace) == ("loopback", "n")
    assert (maps.credential, nearby.credential) == ("user", "none")
    assert (maps.recheck_s, nearby.recheck_s) == (0.0, 1.0)
    assert (maps.era, nearby.era) == ("2025-11-25", "auto")
    assert (files.command, files.args) == ("/bin/true", ["--root", 'a "b"'])
    assert [each.name for each in config.parent.iterdir()] == ["tollgate.toml"]


def remove(config: Path, name: str) -> Result:
    flags = ["--home", str(config.parent / "home"), "--config", str(config)]
    return CliRunner().invoke(tollgate, ["mcp", "remove", name, *flags])


def test_a_server_is_removed_with_what_is_of_it_alone(config: Path) -> None:
    assert add(config, "maps", "--url", "https://maps.example/mcp").exit_code == 0
    with config.open("a") as file:
        file.write("args = []\n[mcp.servers.sampling]\nby = 'off'\n# of the plans\n[plan.p]\n")
    middle = config.read_text()
    assert add(config, "files", "--command", "/bin/true").exit_code == 0
    assert add(config, "more", "--command", "/bin/true").exit_code == 0
    assert remove(config, "files").exit_code == 0
    assert [each.name for each in load({"config": config}, {}).mcp.servers] == ["maps", "more"]
    assert remove(config, "nobody").exit_code == 1
    assert remove(config, "more").exit_code == 0
    assert config.read_text().rstrip() == middle.rstrip()
    done = remove(config, "maps")
    assert done.exit_code == 0 and "maps" in done.output
    left = config.read_text()
    assert left.startswith(BEFORE) and left.endswith("# of the plans\n[plan.p]\n\n"), left
    assert "mcp" not in left and config.stat().st_mode & 0o777 == 0o640


def test_what_cannot_be_cut_out_is_left(config: Path) -> None:
    config.write_text("mcp = {servers = [{name = 'a', url = 'https://h.example'}]}\n")
    before = config.read_text()
    done = remove(config, "a")
    assert done.exit_code == 1 and "by hand" in done.output and config.read_text() == before


HAND_WRITTEN = """[[mcp.servers]]
name = "a"
command = "/bin/true"
{digests}
args = ["]"]  # of a

[mcp.servers.limits]
cpu_s = 1

[[mcp.servers]]
name = "b"
command = "/bin/true"
digests = []
"""


@pytest.mark.parametrize(
    "digests",
    ["", "digests = []", 'digests = [  # "]"\n  {kind = "file", path = "/", sha256 = "]"},\n]'],
)
def test_one_key_of_one_server_is_rewritten(digests: str) -> None:
    before = HAND_WRITTEN.format(digests=digests)
    value = [{"kind": "file", "path": 'a"\u007f\U0001f600', "sha256": "0"}]
    found = with_key(before, "a", "digests", value)
    assert tomllib.loads(found)["mcp"]["servers"] == [
        {**tomllib.loads(before)["mcp"]["servers"][0], "digests": value},
        tomllib.loads(before)["mcp"]["servers"][1],
    ]
    left = [line for line in found.splitlines() if not line.startswith("digests =")]
    assert set(left) <= set(before.splitlines()) and "# of a" in found


def test_what_cannot_be_told_apart_is_to_be_written_by_hand() -> None:
    tables = '[[mcp.servers]]\nname = "a"\n[[mcp.servers.digests]]\nkind = "file"\n'
    for content in (tables, 'mcp = {servers = [{name = "a"}]}\n'):
        with pytest.raises(ClickException, match=r"a: write it by hand: digests = \[\]"):
            with_key(content, "a", "digests", [])


def described(config: Path, **more: object) -> str:
    """The path of a document, beside the settings' folder."""
    folder = config.parent / "documents"
    folder.mkdir(exist_ok=True)
    made = folder / "api.json"
    made.write_text(json.dumps({"openapi": "3.1.0", "paths": {}, **more}))
    return str(made)


def test_an_api_is_added_by_its_document(config: Path) -> None:
    """It is asked where the operator says, or where the document does, which is written down."""
    there = described(config, servers=[{"url": "https://api.example/v1"}, {"url": "/v2"}])
    one = add(config, "one", "--openapi", there)
    assert one.exit_code == 0 and "asked at https://api.example/v1" in one.output
    given = ("--openapi", there, "--url", "https://api.example/v3")
    assert add(config, "two", *given).exit_code == 0
    far = ("--openapi", "https://api.example/openapi.json", "--url", "https://api.example")
    assert add(config, "far", *far).exit_code == 0
    found = load({"config": config}, {}).mcp.servers
    assert [(each.openapi, each.url) for each in found] == [
        (there, "https://api.example/v1"),
        (there, "https://api.example/v3"),
        (far[1], "https://api.example"),
    ]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "--url"),
        ({"servers": [{"url": "/v1"}]}, "--url"),
        ({"servers": [{"url": "https://{host}/v1"}]}, "--url"),
        ({"servers": [{"url": "http://169.254.169.254/"}]}, "not a public address"),
        ({"servers": [{"url": "https://h/"}], "openapi": "2.0"}, "/openapi: must be 3.0.x or"),
        ({"paths": {"/\u202e": {"$ref": "http://h"}}, "servers": [{"url": "https://h"}]}, "202E"),
    ],
)
def test_a_document_that_will_not_do_is_not_added(
    config: Path, document: dict[str, object], said: str
) -> None:
    done = add(config, "api", "--openapi", described(config, **document))
    assert done.exit_code != 0 and said in done.output, done.output
    assert config.read_text() == BEFORE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("maps",), "--url"),
        (("maps", "--openapi", "https://a.example/x"), "--url"),
        (("maps", "--openapi", "/nowhere", "--url", "https://a.example"), "No such file"),
        (("maps", "--openapi", "/x", "--command", "/bin/true"), "--command"),
        (("a", "--openapi", "http://a.example/x", "--url", "https://a.example"), "http is for"),
        (("a", "--openapi", "https://169.254.169.254/x", "--url", "https://a.example"), "public"),
        (("a", "--openapi", "https://a.example/x", "--url", "https://a.example/?b=c"), "base URL"),
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
