"""RFC 9728: what a resource says of itself, and how a refusal leads there."""

from __future__ import annotations

import msgspec
import pytest

from gateway.auth.errors import (
    ExpiredToken,
    InvalidKey,
    MissingCredential,
    MissingScope,
    WrongNetwork,
)
from gateway.auth.oauth.rfc9449_dpop import InvalidProof
from gateway.auth.oauth.rfc9728_protected_resource import (
    challenge,
    find_error,
    find_metadata,
    metadata_url,
)

PUBLIC_URL = "https://gateway.example.com"
MCP = "/mcp/org_" + "0" * 32


@pytest.mark.parametrize("path", ["", "/v1", MCP])
def test_the_metadata_names_the_resource_and_its_authorization_server(path: str) -> None:
    found = msgspec.to_builtins(find_metadata(path, PUBLIC_URL))
    assert found["resource"] == PUBLIC_URL + path
    assert found["authorization_servers"] == (PUBLIC_URL,)
    assert found["bearer_methods_supported"] == ("header",)


def test_the_tools_of_a_tenant_want_one_scope() -> None:
    found = find_metadata(MCP, PUBLIC_URL)
    assert found is not None and found.scopes_supported == ("mcp:call",)


@pytest.mark.parametrize("path", ["/", "/v2", "/mcp", "/mcp/", "/mcp/org_1", MCP + "/", MCP + "x"])
def test_what_is_no_resource_has_no_metadata(path: str) -> None:
    assert find_metadata(path, PUBLIC_URL) is None


def test_the_well_known_part_stands_between_host_and_path() -> None:
    url = metadata_url(MCP, PUBLIC_URL)
    assert url == f"{PUBLIC_URL}/.well-known/oauth-protected-resource{MCP}"


def test_a_challenge_says_what_is_wrong_and_where_to_go() -> None:
    assert challenge("", PUBLIC_URL) == (
        f'Bearer resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource"'
    )
    assert challenge(MCP, PUBLIC_URL, scope="mcp:call", error="insufficient_scope") == (
        'Bearer error="insufficient_scope", scope="mcp:call", '
        f'resource_metadata="{metadata_url(MCP, PUBLIC_URL)}"'
    )
    assert challenge("", PUBLIC_URL, error="invalid_dpop_proof", scheme="DPoP") == (
        'DPoP error="invalid_dpop_proof", algs="ES256 ES384 PS256 RS256 Ed25519", '
        f'resource_metadata="{metadata_url("", PUBLIC_URL)}"'
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MissingScope("inference"), "insufficient_scope"),
        (InvalidProof("old"), "invalid_dpop_proof"),
        (MissingCredential("none"), None),
        (InvalidKey("unknown"), "invalid_token"),
        (ExpiredToken("jti"), "invalid_token"),
        (WrongNetwork("key"), "invalid_token"),
        (ValueError("something else"), None),
    ],
)
def test_what_was_wrong_is_said_of_a_credential_that_was_shown(
    error: Exception, said: str | None
) -> None:
    assert find_error(error) == said
