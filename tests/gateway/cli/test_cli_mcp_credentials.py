"""`tollgate mcp diff`, `approve`, `list` and `doctor` of a server that wants a token: it is shown
what the tenant's clients show it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from mcp.server.auth.provider import AccessToken

from gateway.audit.log import COMMAND_LINE
from gateway.cli.mcp.offers import org_of
from gateway.cli.shared import administration
from gateway.secret import Secret
from gateway.settings.load import load
from gateway.vault.credentials import put_credential
from gateway.vault.envelope import Vault
from tests.gateway.cli.test_main import environ, folder, invoke
from tests.gateway.mcp.signing_server import SCOPE, Signing, signing

__all__ = ["environ", "folder"]

CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[[mcp.servers]]
name = "up"
url = "URL"
network = "loopback"
credential = "tenant"
"""
TOKEN = "of-the-tenant"


@pytest.fixture
def server() -> Iterator[Signing]:
    with signing() as found:
        found.provider.alive[TOKEN] = AccessToken(
            token=TOKEN, client_id="us", scopes=[SCOPE], resource=found.mcp_url
        )
        yield found


@pytest.fixture
def config(environ: dict[str, str], folder: Path, server: Signing) -> Path:
    made = folder / "servers.toml"
    made.write_text(CONFIG.replace("URL", server.mcp_url))
    assert invoke(environ, "migrate").exit_code == 0
    return made


def give(environ: dict[str, str], config: Path) -> None:
    """The tenant's credential."""
    settings = load({"config": config}, environ)
    secret = Secret.load_or_create(settings.secret_key_file)

    async def work() -> None:
        async with administration.connections(settings) as (db, _):
            org_id = await org_of(db, "default", "default")
            async with db.begin() as conn:
                await put_credential(
                    conn,
                    Vault(secret),
                    org_id=org_id,
                    upstream="up",
                    user_id=None,
                    values={"Authorization": f"Bearer {TOKEN}"},
                    actor=COMMAND_LINE,
                )

    asyncio.run(work())


def test_a_server_is_shown_what_the_tenants_clients_show_it(
    environ: dict[str, str], config: Path
) -> None:
    def mcp(*arguments: str) -> Result:
        return invoke(environ, "mcp", *arguments, "--config", str(config))

    refused = mcp("diff", "up")
    assert refused.exit_code != 0 and "consent_needed" in refused.output
    assert "/oauth/upstream/up/start" in refused.output, "who approves is told where to sign in"
    give(environ, config)
    found = mcp("diff", "up")
    assert found.exit_code == 0 and "new       tool whoami" in found.output, found.output
    approved = mcp("approve", "up", "--all")
    assert approved.exit_code == 0 and approved.output.endswith("2 approved.\n"), approved.output
    (listed,) = map(json.loads, mcp("list", "--json").stdout.splitlines())
    assert (listed["approved"], listed["waiting"], listed["problem"]) == (2, 0, None)
    well = mcp("doctor")
    assert well.exit_code == 0 and "1 tools, 2 approved, 0 wait" in well.output
    assert TOKEN not in found.output + approved.output + well.output
