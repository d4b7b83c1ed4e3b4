"""The public conformance suite's server scenarios: before the fixture server itself, before it
behind a whole gateway, and behind the bridge alone for clients and servers of the same era and of
each other's.

`make mcp-conformance` installs the suite (npm) and runs this; without it there is nothing to run.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.world import KIT, KITTED, NODE
from tests.mcp_bridge.conftest import all_eras, bridge_redis_url
from tests.mcp_bridge.processes import LEGACY, MODERN, Eras, running
from tests.stack import Stack
from tests.stack import running as running_stack

__all__ = ["all_eras", "bridge_redis_url"]

pytestmark = KITTED
SUITE = KIT / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
REQUIREMENTS = KIT / "@modelcontextprotocol" / "conformance" / "requirements"
SCORED = {LEGACY: 30, MODERN: 37}
"""Scenarios of each revision."""
TIMEOUT_S = 240
CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[[mcp.servers]]
name = "fixture"
url = "URL"
network = "loopback"
namespace = "identity"
trust = "TRUST"
"""


def required(revision: str) -> set[str]:
    """Return a server's required scenarios; read without a YAML parser's opinion of the rest."""
    section = (REQUIREMENTS / f"{revision}.yaml").read_text().partition("\nserver:\n")[2]
    lines = re.split(r"\n\w", section)[0].splitlines()
    return {line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")}


def failing(url: str, revision: str, folder: Path) -> dict[str, list[str]]:
    """Return, of the scenarios that count, those with a check that fails or warns, and which."""
    command = [NODE, SUITE, "server", "--url", url, "--requirements", revision, "-o", folder]
    subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    found: dict[str, list[str]] = {}
    ran = set()
    for file in folder.glob("*/checks.json"):
        name = re.fullmatch(r"server-(.+?)-\d{4}-\d\d-\d\dT.*", file.parent.name)
        assert name is not None, file
        if name[1] in required(revision):
            ran.add(name[1])
            bad = [
                check["id"]
                for check in json.loads(file.read_text())
                if check["status"] in ("FAILURE", "WARNING")
            ]
            if bad:
                found[name[1]] = bad
    assert ran == required(revision), "a scenario did not run"
    return found


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_these_are_all_scenarios(revision: str) -> None:
    assert len(required(revision)) == SCORED[revision]


@pytest.fixture(scope="module")
def fixture_url() -> Iterator[str]:
    with running(("fixture_server",)) as (server,):
        yield server.url


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_the_fixture_server_passes(fixture_url: str, revision: str, tmp_path: Path) -> None:
    assert failing(fixture_url, revision, tmp_path) == {}


@pytest.fixture(scope="module", params=["all", "pinned"])
def gateway_url(fixture_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The identity namespace of a gateway of two workers, behind who adds the token. Pinned, all
    that its server offers was approved."""
    config = CONFIG.replace("URL", fixture_url).replace("TRUST", request.param)
    with running_stack(config=config, workers=2) as stack:
        if request.param == "pinned":
            approve_all(stack)
        ((org_id, project_id),) = asyncio.run(stack.sql("SELECT org_id, id FROM projects"))
        to = f"{stack.base_url}/mcp/{org_id}/{project_id}/identity"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKEN", stack.create_key("--scope", "mcp:call"))
            with running(("token_proxy", "--to", to)) as (proxy,):
                yield proxy.url


def approve_all(stack: Stack) -> None:
    key = stack.create_key("--scope", "admin:mcp")
    answer = httpx.post(
        f"{stack.base_url}/v1/admin/mcp/servers/fixture/approve",
        json={"all": True},
        headers={"authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_the_gateway_passes(gateway_url: str, revision: str, tmp_path: Path) -> None:
    assert failing(gateway_url, revision, tmp_path) == {}


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_the_bridge_passes(all_eras: dict[str, Eras], revision: str, tmp_path: Path) -> None:
    assert failing(all_eras[revision].first.url, revision, tmp_path) == {}


def test_old_clients_pass_before_a_new_server(all_eras: dict[str, Eras], tmp_path: Path) -> None:
    assert failing(all_eras[MODERN].first.url, LEGACY, tmp_path) == {}


def test_new_clients_pass_before_an_old_server(all_eras: dict[str, Eras], tmp_path: Path) -> None:
    """All that both revisions have, and all else but what needs a server's own keys for what it
    asks: the older era has none."""
    assert failing(all_eras[LEGACY].first.url, MODERN, tmp_path) == {
        "input-required-result-basic-elicitation": ["sep-2322-elicitation-incomplete"],
        "input-required-result-ignore-extra-params": ["sep-2322-ignore-unexpected-params"],
    }
