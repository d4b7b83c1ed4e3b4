"""The authorization server before the public conformance suite and two client libraries that nobody
here wrote.

`make auth-conformance` installs them (npm) and runs this; without them there is nothing to run.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from authlib.integrations.httpx_client import OAuth2Client

from tests.conformance.world import KIT, KITTED, NODE, World, kit_script

pytestmark = KITTED
SUITE = KIT / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
SCENARIOS = {"authorization-server-metadata-endpoint", "authorization-code-grant"}
"""All that the suite has for an authorization server."""


def test_these_are_all_scenarios_of_the_suite() -> None:
    listed = subprocess.run(
        [NODE, SUITE, "list", "--authorization"], capture_output=True, text=True, check=True
    )
    lines = [line.strip() for line in listed.stdout.splitlines()]
    assert {line[2:].split()[0] for line in lines if line.startswith("- ")} == SCENARIOS


def test_the_conformance_suite_passes(world: World, tmp_path: Path) -> None:
    """With a public client: where a server offers `none`, the suite sends no secret, even one that
    it was given."""
    command = [NODE, SUITE, "authorization", "--url", world.issuer, "--resource", world.resource]
    command += ["-p", str(world.callback_port), "--client-id", world.client_id]
    command += ["--verbose", "-o", tmp_path]
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith(f"{world.issuer}/oauth/authorize?"):
                httpx.get(world.allow(line.strip()))
    assert run.returncode == 0, "".join(output)
    # It exits with 0 for what it has skipped or warned of, too.
    results = {each.parent.name: json.loads(each.read_text()) for each in tmp_path.glob("*/*.json")}
    ran = {name for name in SCENARIOS if any(name in folder for folder in results)}
    assert ran == SCENARIOS
    checks = [check for found in results.values() for check in found]
    assert {check["status"] for check in checks} == {"SUCCESS"}, checks


def run_oauth4webapi(world: World, **given: Any) -> dict[str, Any]:
    """The flow of oauth4webapi_client.mjs, with a user who allows it."""
    asked = {
        "issuer": world.issuer,
        "redirectUri": world.redirect_uri,
        "resource": world.resource,
        **given,
    }
    command = [NODE, kit_script("oauth4webapi_client.mjs"), json.dumps(asked)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        url = run.stdout.readline().strip()
        assert url, run.stderr.read()
        run.stdin.write(world.allow(url) + "\n")
        run.stdin.flush()
        found = run.stdout.read()
        assert run.wait(30) == 0, run.stderr.read()
    got: dict[str, Any] = json.loads(found)
    return got


@pytest.mark.parametrize("kind", ["public", "confidential", "dpop"])
def test_oauth4webapi_gets_through_everything_it_knows(world: World, kind: str) -> None:
    given: dict[str, Any] = {"clientId": world.client_id, "dpop": kind == "dpop"}
    if kind == "confidential":
        given |= {"clientId": world.secret_id, "clientSecret": world.secret}
    got = run_oauth4webapi(world, **given)
    assert got["rotated"]
    assert got["subject"] == got["idTokenSubject"] == world.user_id
    assert got["tokenType"] == ("dpop" if kind == "dpop" else "bearer")
    assert got["codes"] == [-32601, -32601], "both tokens were let in"
    if kind == "confidential":
        assert got["active"] == [True, False], "introspected before and after it was revoked"
    assert got["afterRevocation"] == "invalid_grant"


def test_authlibs_client_gets_tokens_and_new_ones(world: World) -> None:
    metadata = httpx.get(f"{world.issuer}/.well-known/oauth-authorization-server").json()
    verifier = "v" * 64
    client = OAuth2Client(
        world.client_id,
        redirect_uri=world.redirect_uri,
        scope="mcp:call offline_access",
        code_challenge_method="S256",
        token_endpoint_auth_method="none",
    )
    with client:
        url, state = client.create_authorization_url(
            metadata["authorization_endpoint"], code_verifier=verifier, resource=world.resource
        )
        answer = world.allow(url)
        token = client.fetch_token(
            metadata["token_endpoint"],
            authorization_response=answer,
            state=state,
            code_verifier=verifier,
        )
        assert world.call(token["access_token"]).json()["error"]["code"] == -32601
        newer = client.refresh_token(metadata["token_endpoint"], token["refresh_token"])
        assert newer["refresh_token"] != token["refresh_token"]
