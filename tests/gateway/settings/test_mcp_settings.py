"""`[[mcp.servers]]`: what would do nothing, or something else than it says, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings.file import SettingsError
from gateway.settings.load import load
from gateway.settings.mcp_servers import issuer_hosts_of

URL = "[[mcp.servers]]\nname = 'a'\nurl = 'https://h.example/mcp'\n"
NEAR = f"{URL}network = 'private'\ncredential = 'user'\n"
COMMAND = "[[mcp.servers]]\nname = 'b'\ncommand = '/bin/true'\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (URL + "recheck_s = -1", "mcp.servers[0].recheck_s: "),
        (URL + "recheck_s = nan", "mcp.servers[0].recheck_s: "),
        (URL + "era = '2024-11-05'", "mcp.servers[0].era: "),
        (URL + "transport = 'sse'\nera = '2026-07-28'", "mcp.servers[0].era: transport = 'sse'"),
        (URL + "openapi = '/x'\nera = '2026-07-28'", "mcp.servers[0].era: is not for a server"),
        (URL + "args = ['x']", "mcp.servers[0].args: is for a server with a command"),
        (URL + "environment = {A = 'x'}", "mcp.servers[0].environment: is for"),
        (URL + "credential_names = ['A']", "mcp.servers[0].credential_names: is for"),
        (URL + "digests = [{kind = 'file', path = '/x'}]", "mcp.servers[0].digests: is for"),
        (URL + "readable = ['/x']", "mcp.servers[0].readable: is for"),
        (URL + "offline = true", "mcp.servers[0].offline: is for"),
        (URL + "limits = {processes = 1}", "mcp.servers[0].limits: is for"),
        (URL + "issuer_hosts = ['h.example']", "mcp.servers[0].issuer_hosts: is for a server with"),
        (NEAR + "issuer_hosts = ['a.internal', '10.1.0.01']", "mcp.servers[0].issuer_hosts[1]: "),
        (NEAR + "issuer_hosts = ['https://a.internal']", "issuer_hosts[0]: not a plain host"),
        (COMMAND + "network = 'private'", "mcp.servers[0].network: is for a server with a url"),
        (COMMAND + "transport = 'sse'", "mcp.servers[0].transport: is for a server with a url"),
        (
            f"{URL}namespace = 'identity'\n{COMMAND}namespace = 'identity'",
            "mcp.servers[1].namespace: 'identity' is for one server alone, and 'a' is in it",
        ),
    ],
)
def test_what_would_do_nothing_is_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "tollgate.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as refused:
        load({"config": path}, {})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "may"),
    [
        ("['login.internal']", True),
        ("['LOGIN.internal', '10.0.0.9']", True),
        ("['h.example']", False),
        ("[]", False),
    ],
)
def test_an_issuers_endpoints_lie_where_they_may(tmp_path: Path, hosts: str, may: bool) -> None:
    """By an address as it is written; by a name as it is dialled."""
    path = tmp_path / "tollgate.toml"
    host = "10.0.0.9" if "10." in hosts or not may else "login.internal"
    oauth = (
        "[mcp.servers.oauth]\nclient_id = 'us'\n"
        f"token_endpoint = 'https://{host}/t'\nauthorization_endpoint = 'https://{host}/a'\n"
    )
    path.write_text(f"{NEAR}issuer_hosts = {hosts}\n{oauth}")
    if may:
        (server,) = load({"config": path}, {}).mcp.servers
        hosts_of = issuer_hosts_of(server)
        assert hosts_of["login.internal"] == hosts_of["h.example"] == "private"
        return
    with pytest.raises(SettingsError, match="oauth.authorization_endpoint: 10.0.0.9 is not a"):
        load({"config": path}, {})


def test_what_is_of_the_other_kind_may_stand_as_it_is_without(tmp_path: Path) -> None:
    path = tmp_path / "tollgate.toml"
    path.write_text(f"{URL}offline = false\nnamespace = 'identity'\n{COMMAND}namespace = 'n'")
    assert [each.name for each in load({"config": path}, {}).mcp.servers] == ["a", "b"]
