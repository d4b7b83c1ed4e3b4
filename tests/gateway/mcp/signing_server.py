"""An MCP server that wants a token of its own authorization server, both of the official SDK, on a
real socket. Whoever comes by browser says yes; what arrived at the server is kept."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.types import ASGIApp, Receive, Scope, Send

TIMEOUT_S = 90.0
PLACES = ("/mcp", "/sse", "/messages/")
SCOPE = "use"


class Provider:
    """All of it in memory. `alive`: the access tokens that are good."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.alive: dict[str, AccessToken] = {}
        self.refreshed = 0
        self.resources: set[str | None] = set()
        self._codes: dict[str, AuthorizationCode] = {}
        self._refresh: dict[str, RefreshToken] = {}
        self._number = itertools.count(1)

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        assert client_info.client_id is not None
        self.clients[client_info.client_id] = client_info

    async def authorize(
        self, client: OAuthClientInformationFull, params: AuthorizationParams
    ) -> str:
        assert client.client_id is not None
        code = AuthorizationCode(
            code=f"code-{next(self._number)}",
            scopes=params.scopes or [],
            expires_at=time.time() + TIMEOUT_S,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        self._codes[code.code] = code
        return construct_redirect_uri(str(params.redirect_uri), code=code.code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self._codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        del self._codes[authorization_code.code]
        return self._issue(authorization_code)

    async def load_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: str
    ) -> RefreshToken | None:
        return self._refresh.get(refresh_token)

    async def exchange_refresh_token(
        self,
        client: OAuthClientInformationFull,
        refresh_token: RefreshToken,
        scopes: list[str],
    ) -> OAuthToken:
        """Good once."""
        del self._refresh[refresh_token.token]
        self.refreshed += 1
        return self._issue(refresh_token)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.alive.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.alive.pop(token.token, None)

    def _issue(self, of: AuthorizationCode | RefreshToken) -> OAuthToken:
        number = next(self._number)
        self.resources.add(of.resource)
        granted: dict[str, Any] = {
            "client_id": of.client_id,
            "scopes": of.scopes,
            "resource": of.resource,
        }
        access, refresh = f"access-{number}", f"refresh-{number}"
        self.alive[access] = AccessToken(token=access, **granted)
        self._refresh[refresh] = RefreshToken(token=refresh, **granted)
        return OAuthToken(
            access_token=access,
            expires_in=3600,
            refresh_token=refresh,
            scope=" ".join(of.scopes),
        )


class Signing:
    """`called`: by which access token each call of the tool was made. `arrived`: every byte of
    heads and bodies that came to the MCP endpoint."""

    def __init__(self, url: str, transport: Literal["http", "sse"]) -> None:
        self.url, self.provider, self.transport = url, Provider(), transport
        self.called: list[str] = []
        self.arrived = bytearray()

    @property
    def mcp_url(self) -> str:
        return f"{self.url}/{'mcp' if self.transport == 'http' else 'sse'}"

    def app(self) -> ASGIApp:
        settings = AuthSettings(
            issuer_url=AnyHttpUrl(self.url),
            resource_server_url=AnyHttpUrl(self.mcp_url),
            client_registration_options=ClientRegistrationOptions(
                enabled=True, valid_scopes=[SCOPE], default_scopes=[SCOPE]
            ),
            required_scopes=[SCOPE],
            validate_token_resource=True,
        )
        server = MCPServer("signing", auth_server_provider=self.provider, auth=settings)

        @server.tool()
        def whoami() -> str:
            """By whose token."""
            from mcp.server.auth.middleware.auth_context import get_access_token

            found = get_access_token()
            assert found is not None
            self.called.append(found.token)
            return found.token

        if self.transport == "http":
            inner = server.streamable_http_app(json_response=True, stateless_http=True)
        else:
            inner = server.sse_app()

        async def seen(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith(PLACES):
                await inner(scope, receive, send)
                return
            for name, value in scope["headers"]:
                self.arrived += name + b": " + value + b"\n"

            async def kept() -> Any:
                event = await receive()
                self.arrived.extend(event.get("body", b""))
                return event

            await inner(scope, kept, send)

        return seen


@contextmanager
def signing(transport: Literal["http", "sse"] = "http") -> Iterator[Signing]:
    """`transport`: `sse` is that of 2024-11-05."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = Signing(f"http://127.0.0.1:{listener.getsockname()[1]}", transport)
        config = uvicorn.Config(
            made.app(), log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="signing")
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
