"""The authorization endpoint for a client whose document its host does not give."""

from __future__ import annotations

import httpx
import pytest
from litestar import Litestar

from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.clients.store import Client
from tests.gateway.auth.browsing import authorize_url, desk_of, query_of


async def test_a_client_whose_document_cannot_be_had_is_asked_to_come_again(
    app: Litestar, signed_in: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(url: str) -> Client | None:
        raise AuthUnavailable("its host does not answer")

    monkeypatch.setattr(desk_of(app).clients, "_fetch", fetch)
    query = query_of("https://app.example.com/client.json")
    response = await signed_in.get(authorize_url(query))
    assert response.status_code == 503 and "text/html" in response.headers["content-type"]
    assert "temporarily_unavailable" in response.text
