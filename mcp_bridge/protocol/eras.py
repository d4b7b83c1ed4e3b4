"""The two eras of MCP and their constants. Pure.

The older era, up to 2025-11-25, begins with a handshake (`initialize`) and keeps a session, in
which the server may send requests to the client. The newer era, 2026-07-28, has neither: each
request carries the client's description and capabilities, and a server that needs something of the
client answers `input_required`.
"""

from __future__ import annotations

from typing import Any, Literal

from mcp_types import methods
from pydantic import ValidationError

from mcp_bridge.protocol.rpc import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
LEGACY_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The older revisions that we speak with clients, newest first."""
Era = Literal["auto", "2026-07-28", "2025-11-25"]
"""The era in which a server is asked: "auto" is that of the client, where the server speaks it."""
ASSUMED_VERSION = "2025-03-26"
"""The revision of a request of the older era without a version header, which it did not have."""
RESUMABLE_FROM = "2025-11-25"
"""The first revision whose streams begin with an event id, so that clients can resume them."""

META = "io.modelcontextprotocol/"
VERSION_META = META + "protocolVersion"
INFO_META = META + "clientInfo"
CAPABILITIES_META = META + "clientCapabilities"
LEVEL_META = META + "logLevel"
SERVER_META = META + "serverInfo"
SUBSCRIPTION_META = META + "subscriptionId"

VERSION_HEADER = "mcp-protocol-version"
SESSION_HEADER = "mcp-session-id"
METHOD_HEADER = "mcp-method"
NAME_HEADER = "mcp-name"
LAST_EVENT_HEADER = "last-event-id"

LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
"""The field of a page that holds its items, by method."""
CACHEABLE = frozenset({*LISTS, "resources/read", "server/discover"})
INTERACTIVE = frozenset({"tools/call", "prompts/get", "resources/read"})
"""Requests during which a server may ask the client something."""
FORWARDED = frozenset({*LISTS, *INTERACTIVE, "completion/complete"})
"""Requests that are forwarded to a server, in either era."""
NEEDED_CAPABILITY = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}
"""The client capability that each request of a server needs."""
SampledBy = Literal["caller", "engine", "off"]
"""The model that answers a server's sampling requests: the caller's, ours, or none."""
SAMPLING_BY: dict[SampledBy, dict[str, Any] | None] = {
    "caller": {},
    "engine": {"tools": {}},
    "off": None,
}
"""The sampling capability that a server is told of on a shared connection; None: no capability.
Our models call tools; not all callers that share a connection have models that do."""
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LIST_CHANGES = {
    "notifications/tools/list_changed": "toolsListChanged",
    "notifications/prompts/list_changed": "promptsListChanged",
    "notifications/resources/list_changed": "resourcesListChanged",
}
"""The flag of a `subscriptions/listen` for each notification."""
RESOURCE_UPDATED = "notifications/resources/updated"


def is_legacy(version: str) -> bool:
    """True if this version header names a known revision of the older era, or is missing. The newer
    era refuses unknown versions."""
    return version == "" or version in LEGACY_VERSIONS or version == "2024-11-05"


def negotiate_version(wanted: Any) -> str:
    """Return the version that answers a client's `initialize`."""
    return wanted if wanted in LEGACY_VERSIONS else LEGACY


def check_request(method: str, version: str, params: dict[str, Any]) -> None:
    """Check a method and its parameters against a revision. Raises: RpcError."""
    try:
        methods.validate_client_request(method, version, params)
    except KeyError:
        raise RpcError(METHOD_NOT_FOUND, "Method not found", method) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RpcError(INVALID_PARAMS, f"Invalid params: {where}: {first['msg']}") from None


def is_at_least(level: Any, wanted: str) -> bool:
    """True if a log entry of `level` is at or above `wanted`."""
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(wanted)


LOG = "notifications/message"


def passes_level(message: dict[str, Any], level: str | None) -> bool:
    """True unless the message is a log entry below the client's level; not all servers filter."""
    if level is None or message["method"] != LOG:
        return True
    return is_at_least((message.get("params") or {}).get("level"), level)
