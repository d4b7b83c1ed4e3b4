"""Our client identity at servers where people sign in is what the operator's file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.auth.oauth.clients.metadata_documents import to_metadata
from gateway.mcp.sign_ins import SignedInAt, own_document, to_signed_in_at
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from gateway.vault.registration import KnownClient

SERVER = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"
[[mcp.servers]]
name = "up"
url = "https://up.example/mcp"
credential = "user"
[mcp.servers.oauth]
client_id = "us"
"""
ENDPOINTS = (
    'token_endpoint = "https://as.example/t"\nauthorization_endpoint = "https://as.example/a"'
)


def signed_in_at(tmp_path: Path, more: str, **changed: str) -> SignedInAt:
    text = SERVER
    for before, after in changed.items():
        text = text.replace(before, after)
    path = tmp_path / "tollgate.toml"
    path.write_text(text + more)
    (server,) = load({"home": tmp_path, "config": path}, {}).mcp.servers
    found = to_signed_in_at(server)
    assert found is not None
    return found


def test_what_is_written_down_and_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = signed_in_at(tmp_path, "")
    assert (at.client, at.known) == (None, KnownClient(client_id="us"))
    monkeypatch.setenv("UP_SECRET", "s3cret")
    secret = 'client_secret_env = "UP_SECRET"\nissuer = "https://as.example"\n'
    known = signed_in_at(tmp_path, secret).known
    assert known is not None
    assert known.client_secret == "s3cret" and known.issuer == "https://as.example"
    at = signed_in_at(tmp_path, secret + ENDPOINTS)
    client = at.client
    assert client is not None
    assert client.client_secret == "s3cret" and client.auth_method == "client_secret_basic"
    assert client.token_endpoint == "https://as.example/t"
    bare = {"[mcp.servers.oauth]\nclient_id": "namespace"}
    at = signed_in_at(tmp_path, "", **bare)
    assert (at.client, at.known) == (None, None), "its URL is enough"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('client_secret_env = "UP_SECRET"', "oauth.issuer: whose the secret is"),
        ('token_endpoint = "https://as.example/t"', "oauth.token_endpoint: is for an oauth with"),
        ('scope = "read"', "oauth.scope: is for an oauth with"),
        (ENDPOINTS.replace("https", "http"), "oauth.authorization_endpoint: "),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        signed_in_at(tmp_path, more)


def test_nobodys_credential_is_signed_in_for_nowhere(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is for a url with credential"):
        signed_in_at(tmp_path, "", user="none")


def test_a_document_is_read_over_https_alone() -> None:
    assert own_document("http://127.0.0.1:8000") is None
    found = own_document("https://gateway.example")
    assert (
        found is not None and found["client_id"] == "https://gateway.example/oauth/upstream/client"
    )
    client = to_metadata(found["client_id"], found)  # as our own issuer reads those of others
    assert client.redirect_uris == ["https://gateway.example/oauth/upstream/callback"]
