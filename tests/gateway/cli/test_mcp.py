"""`tollgate mcp add` asks a running gateway, or nothing is added. `tollgate mcp diff` prints what
differs as it is found."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner

from gateway.cli.main import tollgate
from gateway.cli.mcp.adding import described as described_by
from gateway.cli.mcp.offers import show_changes
from gateway.settings.edit import with_key
from gateway.settings.load import load
from mcp_bridge.pinning import Change, pin_of
from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

SERVERS = "/v1/admin/settings/mcp_servers"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        homes = [{"home": "host:/home", "in_force": True, "problem": None}]
        found.on("POST", SERVERS, {"changes": ["+ mcp.servers.x = {}"]}, status=201)
        found.on("DELETE", f"{SERVERS}/maps", {"changes": ["- mcp.servers.maps = {}"]})
        found.on("GET", "/v1/admin/settings", {"number": 1, "homes": homes})
        found.on("GET", "/v1/admin/organization", {"id": "org_1"})
        found.on("GET", "/v1/admin/orgs", {"data": [{"id": "org_2", "name": "acme"}]})
        yield found


def added(gateway: FakeGateway) -> list[Any]:
    return [body for method, path, _, body in gateway.asked if (method, path) == ("POST", SERVERS)]


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


def test_what_is_said_of_a_server_is_what_is_sent(gateway: FakeGateway) -> None:
    maps = "https://maps.example/mcp"
    wary = ("--credential", "user", "--recheck-s", "0", "--era", "2025-11-25")
    for arguments, content in (
        (("maps", maps), {}),
        (
            ("maps", maps, *wary),
            {"credential": "user", "recheck_s": 0.0, "era": "2025-11-25"},
        ),
        (
            ("maps", maps, "--network", "private", "--namespace", "n", "--org", "acme"),
            {"network": "private", "namespace": "n", "orgs": ["org_2"]},
        ),
        (("maps", "https://a.example", "--openapi", maps), {"openapi": maps}),
    ):
        done = gateway.run("mcp", "add", *arguments)
        assert done.exit_code == 0, done.output
        assert "+ mcp.servers.x = {}" in done.output and "mcp approve maps --all" in done.output
        body = added(gateway)[-1]
        assert body["name"] == "maps"
        assert body["content"] == {"url": arguments[1], **content}


def test_a_dry_run_is_one_of_the_gateway(gateway: FakeGateway) -> None:
    done = gateway.run("mcp", "add", "maps", "https://maps.example/mcp", "--dry-run")
    assert done.exit_code == 0 and done.output.endswith("Nothing is stored.\n")
    done = gateway.run("mcp", "remove", "maps", "--dry-run")
    assert done.exit_code == 0 and done.output.endswith("Nothing is stored.\n")
    assert [query for _, _, query, _ in gateway.asked] == [{"dry_run": ["true"]}] * 2


def test_a_home_that_refuses_it_is_named_with_the_reason(gateway: FakeGateway) -> None:
    homes = [{"home": "host:/b", "in_force": False, "problem": "no such variable"}]
    gateway.on("GET", "/v1/admin/settings", {"number": 1, "homes": homes})
    done = gateway.run("mcp", "remove", "maps")
    assert done.exit_code == 1
    assert "stored, but not in force in host:/b: no such variable" in done.output


def test_a_server_of_the_file_is_removed_there(gateway: FakeGateway) -> None:
    done = gateway.run("mcp", "remove", "files")
    assert done.exit_code == 2 and "one of the settings file is taken out there" in done.output


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


def described(folder: Path, **more: object) -> str:
    """The path of a document."""
    made = folder / "api.json"
    made.write_text(json.dumps({"openapi": "3.1.0", "paths": {}, **more}))
    return str(made)


def test_an_api_is_asked_where_it_is_said_or_where_its_document_says(tmp_path: Path) -> None:
    there = described(tmp_path, servers=[{"url": "https://api.example/v1"}, {"url": "/v2"}])
    assert described_by("one", there, None) == (there, "https://api.example/v1")
    other = "https://api.example/v3"
    assert described_by("two", there, other) == (there, other)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "the API's URL"),
        ({"servers": [{"url": "/v1"}]}, "the API's URL"),
        ({"servers": [{"url": "https://{host}/v1"}]}, "the API's URL"),
        ({"servers": [{"url": "https://h/"}], "openapi": "2.0"}, "/openapi: must be 3.0.x or"),
        ({"paths": {"/\u202e": {"$ref": "http://h"}}, "servers": [{"url": "https://h"}]}, "202E"),
    ],
)
def test_a_document_that_will_not_do_is_not_added(
    tmp_path: Path, document: dict[str, object], said: str
) -> None:
    with pytest.raises(ClickException, match=said):
        described_by("api", described(tmp_path, **document), None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("maps",), "name the server's URL"),
        (("maps", "--openapi", "https://a.example/x"), "the API's URL"),
        (("maps", "--openapi", "/nowhere", "https://a.example"), "No such file"),
        (("maps", "--openapi", "/x", "--", "/bin/true"), "name the server's URL"),
        (("maps", "https://a.example", "/bin/true"), "behind the URL stands"),
        (("maps", "https://a.example", "--unpinned"), "name the server's URL"),
        (("maps", "https://a.example", "--recheck-s", "-1"), "recheck-s"),
    ],
)
def test_what_cannot_be_is_not_sent(
    gateway: FakeGateway, arguments: tuple[str, ...], said: str
) -> None:
    target = ("--url", gateway.url, "--key", "sk-test")
    done = CliRunner().invoke(tollgate, ["mcp", "add", *target, *arguments])
    assert done.exit_code != 0 and said in done.output, done.output
    assert gateway.asked == []


def test_a_program_is_added_at_the_machine_of_its_home(gateway: FakeGateway) -> None:
    target = ("--url", gateway.url, "--key", "sk-test")
    done = CliRunner().invoke(tollgate, ["mcp", "add", *target, "files", "--", "/bin/true"])
    assert done.exit_code == 2 and "at the machine of the home" in done.output
    assert gateway.asked == []


def test_without_a_gateway_nothing_is_added(tmp_path: Path) -> None:
    where = ("--home", str(tmp_path), "--key", "sk-test")
    for server in (("https://maps.example/mcp",), ("--", "/bin/true")):
        done = CliRunner().invoke(tollgate, ["mcp", "add", *where, "--port", "1", "x", *server])
        assert done.exit_code == 1 and "no gateway" in done.output, done.output
