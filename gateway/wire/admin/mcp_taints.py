"""/v1/admin/mcp/taints: what clients read."""

from __future__ import annotations

import msgspec


class McpTaint(msgspec.Struct, frozen=True, kw_only=True):
    """A taint: the calls with side effects of its caller ask a person first."""

    object: str = "mcp.taint"
    client_id: str
    """The key or OAuth client."""
    subject_id: str
    """The user, service account or key that it acts for."""
    project_id: str
    servers: list[str]
    """The servers whose results taint a session."""
    expires_at: int
    """In Unix seconds, if they say nothing more."""


class McpTaints(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[McpTaint]
