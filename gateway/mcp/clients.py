"""Our OAuth client identities at the authorization servers of MCP servers, from the settings."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.settings.file import WrittenMcpOauth, WrittenMcpServer
from gateway.settings.load import read_secret
from gateway.settings.mcp_servers import EXCHANGE


def is_signed_in_at(server: WrittenMcpServer) -> bool:
    """Return whether people sign in at a server."""
    exchanges = server.oauth is not None and server.oauth.grant == EXCHANGE
    return server.url is not None and server.credential != "none" and not exchanges


def client_fields(oauth: WrittenMcpOauth) -> dict[str, Any]:
    """Return what the settings say of a client, its secret among it. Raises: SettingsError."""
    fields = {k: v for k, v in msgspec.structs.asdict(oauth).items() if v is not None}
    del fields["grant"]
    variable = fields.pop("client_secret_env", None)
    if variable is not None:
        fields["client_secret"] = read_secret(variable, "mcp.servers.oauth.client_secret_env")
    return fields
