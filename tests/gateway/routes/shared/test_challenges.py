"""Refusals of the API: a 401 says how to get in (RFC 6750, section 3; RFC 9728, 5.1)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from gateway.app.create import create_app
from gateway.auth.errors import InvalidKey
from gateway.networks import Networks
from gateway.principal import Principal
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry

PUBLIC_URL = "https://tollgate.example"
API = f'resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource/v1"'
WHOLE = f'resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource"'
CHALLENGE = "www-authenticate"


class Doorkeeper:
    async def authenticate(self, bearer: str) -> Principal:
        if bearer != "reader":
            raise InvalidKey("unknown")
        return Principal(
            org_id="o", project_id="p", key_id="k", key_hint="", scopes=frozenset({"usage:read"})
        )


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(load({"home": tmp_path, "public_url": PUBLIC_URL}, {}))
    app.state.services = SimpleNamespace(
        telemetry=Telemetry(models=[]), authenticator=Doorkeeper(), trusted_proxies=Networks()
    )
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/organization/projects", "/v1/admin/oauth/clients"]
)
async def test_who_shows_nothing_is_told_where_to_go_and_of_no_error(
    http: httpx.AsyncClient, path: str
) -> None:
    for headers in ({}, {"authorization": "Basic eDp5"}):
        refused = await http.get(path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers[CHALLENGE] == f"Bearer {API}"


async def test_a_credential_that_is_not_believed_is_an_invalid_token(
    http: httpx.AsyncClient,
) -> None:
    headers = {"authorization": "Bearer sk-unknown"}
    refused = await http.get("/v1/models", headers=headers)
    assert refused.status_code == 401
    assert refused.headers[CHALLENGE] == f'Bearer error="invalid_token", {API}'
    refused = await http.get("/oauth/userinfo", headers=headers)
    assert refused.headers[CHALLENGE] == f'Bearer error="invalid_token", {WHOLE}'
    refused = await http.get("/v1/models", headers={"authorization": "DPoP x"})
    algs = 'algs="ES256 ES384 PS256 RS256 Ed25519"'
    said = f'DPoP error="invalid_dpop_proof", {algs}, {API}'
    assert (refused.status_code, refused.headers[CHALLENGE]) == (401, said)


async def test_a_missing_scope_is_named(http: httpx.AsyncClient) -> None:
    refused = await http.get("/v1/models", headers={"authorization": "Bearer reader"})
    assert refused.status_code == 403
    said = f'Bearer error="insufficient_scope", scope="inference", {API}'
    assert refused.headers[CHALLENGE] == said


async def test_the_metadata_stands_where_the_challenge_says(http: httpx.AsyncClient) -> None:
    for challenge, resource in ((API, PUBLIC_URL + "/v1"), (WHOLE, PUBLIC_URL)):
        url = challenge.partition('"')[2].rstrip('"').removeprefix(PUBLIC_URL)
        assert (await http.get(url)).json()["resource"] == resource
    other = await http.get("/nothing/there")
    assert other.status_code == 404 and CHALLENGE not in other.headers
