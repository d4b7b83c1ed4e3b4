"""RFC 7591, section 2: what a client may say about itself."""

from __future__ import annotations

from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey

from gateway.auth.oauth.clients.metadata import (
    GRANT_TYPES_OF_STRANGERS,
    MAX_KEYS,
    MAX_REDIRECT_URIS,
    InvalidMetadata,
    from_document,
)

URIS = {"redirect_uris": ["https://client.example/cb"]}
PUBLIC = ECKey.generate_key("P-256", private=False).as_dict(private=False)
WITH_KEYS = {**URIS, "token_endpoint_auth_method": "private_key_jwt", "jwks": {"keys": [PUBLIC]}}


def test_what_is_left_out_has_the_defaults_of_the_standard() -> None:
    found = from_document({**URIS, "client_name": None, "what_is_this": 1})
    assert found.token_endpoint_auth_method == "client_secret_basic"
    assert (found.grant_types, found.response_types) == (["authorization_code"], ["code"])
    assert not found.native and found.scopes == [] and found.client_name is None


def test_a_client_is_native_where_it_says_so_or_all_its_redirects_are() -> None:
    loopback = ["http://127.0.0.1/cb", "http://localhost/cb"]
    assert from_document({"redirect_uris": loopback}).native
    assert not from_document({"redirect_uris": [*loopback, "https://client.example/cb"]}).native
    assert not from_document({"redirect_uris": loopback, "application_type": "web"}).native
    agent = ["cursor://anysphere.cursor-mcp/oauth/callback", "https://www.cursor.example/cb"]
    public = {"token_endpoint_auth_method": "none"}
    assert from_document({"redirect_uris": agent, **public}).native
    for more in ({}, {"application_type": "web", **public}):
        with pytest.raises(InvalidMetadata, match="without a secret"):
            from_document({"redirect_uris": agent, **more})
    assert from_document({**URIS, "application_type": "native"}).native


def test_keys_and_scopes_are_read() -> None:
    assert from_document(WITH_KEYS).jwks == {"keys": [PUBLIC]}
    by_uri = {**URIS, "token_endpoint_auth_method": "private_key_jwt"}
    found = from_document({**by_uri, "jwks_uri": "https://client.example/jwks"})
    assert found.jwks_uri == "https://client.example/jwks"
    assert from_document({**URIS, "scope": "openid  inference"}).scopes == ["openid", "inference"]
    alone = {"grant_types": ["client_credentials"], "response_types": []}
    assert from_document(alone).redirect_uris == []


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "body"),
        ("text", "body"),
        ({}, "redirect_uris"),
        ({"redirect_uris": []}, "redirect_uris"),
        ({"redirect_uris": "https://client.example/cb"}, "redirect_uris"),
        ({"redirect_uris": ["http://client.example/cb"]}, "redirect_uris"),
        ({"redirect_uris": URIS["redirect_uris"] * 2}, "redirect_uris"),
        (
            {"redirect_uris": [f"https://c.example/{n}" for n in range(MAX_REDIRECT_URIS + 1)]},
            "redirect_uris",
        ),
        ({"redirect_uris": ["com.example.app:/cb"], "application_type": "web"}, "redirect_uris"),
        ({**URIS, "application_type": "desktop"}, "application_type"),
        ({**URIS, "grant_types": []}, "grant_types"),
        ({**URIS, "grant_types": ["implicit"]}, "grant_types"),
        ({**URIS, "grant_types": ["password"]}, "grant_types"),
        ({**URIS, "grant_types": ["client_credentials"]}, "grant_types"),
        ({**URIS, "response_types": ["token"]}, "response_types"),
        ({**URIS, "response_types": []}, "response_types"),
        ({**URIS, "token_endpoint_auth_method": "client_secret_jwt"}, "token_endpoint_auth_method"),
        ({**URIS, "token_endpoint_auth_method": "private_key_jwt"}, "jwks"),
        ({**WITH_KEYS, "jwks_uri": "https://client.example/jwks"}, "jwks"),
        ({**URIS, "jwks_uri": "http://client.example/jwks"}, "jwks_uri"),
        ({**URIS, "jwks": {}}, "jwks"),
        ({**URIS, "jwks": {"keys": []}}, "jwks"),
        ({**URIS, "jwks": {"keys": [PUBLIC] * (MAX_KEYS + 1)}}, "jwks"),
        ({**URIS, "jwks": {"keys": [{"kty": "none"}]}}, "jwks"),
        ({**URIS, "jwks": {"keys": ["key"]}}, "jwks"),
        ({**URIS, "jwks": {"keys": [OctKey.generate_key(256).as_dict()]}}, "jwks"),
        ({**URIS, "jwks": {"keys": [RSAKey.generate_key(2048).as_dict(private=True)]}}, "jwks"),
        ({**URIS, "client_name": ""}, "client_name"),
        ({**URIS, "client_name": "x" * 101}, "client_name"),
        ({**URIS, "client_name": " x"}, "client_name"),
        ({**URIS, "client_name": "a\u202eb"}, "client_name"),
        ({**URIS, "client_name": 1}, "client_name"),
        ({**URIS, "client_uri": "javascript:alert(1)"}, "client_uri"),
        ({**URIS, "logo_uri": "http://client.example/logo"}, "logo_uri"),
        ({**URIS, "contacts": ["x"] * 9}, "contacts"),
        ({**URIS, "contacts": ["x" * 257]}, "contacts"),
        ({**URIS, "software_id": "x" * 257}, "software_id"),
        ({**URIS, "scope": "x" * 2049}, "scope"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_its_name(document: Any, field: str) -> None:
    with pytest.raises(InvalidMetadata) as refused:
        from_document(document, grant_types=GRANT_TYPES_OF_STRANGERS)
    assert refused.value.param == field
    is_redirect = field == "redirect_uris"
    assert refused.value.error == (
        "invalid_redirect_uri" if is_redirect else "invalid_client_metadata"
    )


def test_a_client_that_comes_alone_has_a_secret() -> None:
    document = {
        "grant_types": ["client_credentials"],
        "response_types": [],
        "token_endpoint_auth_method": "none",
    }
    with pytest.raises(InvalidMetadata, match="token_endpoint_auth_method"):
        from_document(document)
