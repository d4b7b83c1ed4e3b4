"""The revisions of MCP in two eras, and what each knows.

Pure.

2025-11-25 and what came before it shake hands (`initialize`) and keep a session, in which the
server may ask the client. 2026-07-28 has neither: each request says who asks and what it can, and a
server that needs something answers `input_required`.
"""

from __future__ import annotations

from typing import Any, Literal

from mcp_types import methods
from pydantic import ValidationError

from mcp_bridge.protocol.rpc import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
LEGACY_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""That clients may agree on with us, the newest first."""
ASSUMED_VERSION = "2025-03-26"
"""Of a request of the older era without the header: this one had none."""
RESUMABLE_FROM = "2025-11-25"
"""From there on a stream begins with an id from which a client may read on."""

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
"""What a page of each method holds, by the name of its field."""
CACHEABLE = frozenset({*LISTS, "resources/read", "server/discover"})
INTERACTIVE = frozenset({"tools/call", "prompts/get", "resources/read"})
"""Requests during which a server may want something of the client."""
FORWARDED = frozenset({*LISTS, *INTERACTIVE, "completion/complete"})
"""Requests that a server behind us answers, in either era."""
NEEDED_CAPABILITY = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}
"""Of a client, for what a server may ask of it."""
SampledBy = Literal["caller", "engine", "off"]
"""Who writes what a server wants of a model: its caller's, ours, or nobody's."""
SAMPLING_BY: dict[SampledBy, dict[str, Any] | None] = {
    "caller": {},
    "engine": {"tools": {}},
    "off": None,
}
"""What a server is told of it, as of a client's capability: a model of ours calls tools, of callers
that share a connection not all do. None: nothing."""
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LIST_CHANGES = {
    "notifications/tools/list_changed": "toolsListChanged",
    "notifications/prompts/list_changed": "promptsListChanged",
    "notifications/resources/list_changed": "resourcesListChanged",
}
"""By notification, the flag of a `subscriptions/listen` that asks for it."""
RESOURCE_UPDATED = "notifications/resources/updated"


def is_legacy(version: str) -> bool:
    """True if a request of this version header is of an older revision: whatever is no known older
    revision is the newer era's to refuse."""
    return version == "" or version in LEGACY_VERSIONS or version == "2024-11-05"


def agree(wanted: Any) -> str:
    """Return the version that answers a client's `initialize`."""
    return wanted if wanted in LEGACY_VERSIONS else LEGACY


def check_request(method: str, version: str, params: dict[str, Any]) -> None:
    """Raises: RpcError, for a method that this revision does not know, or parameters that are none
    of it."""
    try:
        methods.validate_client_request(method, version, params)
    except KeyError:
        raise RpcError(METHOD_NOT_FOUND, "Method not found", method) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RpcError(INVALID_PARAMS, f"Invalid params: {where}: {first['msg']}") from None


def is_at_least(level: Any, wanted: str) -> bool:
    """True if a log entry of `level` is shown to who asked for `wanted` and above."""
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(wanted)


LOG = "notifications/message"


def is_loud_enough(message: dict[str, Any], level: str | None) -> bool:
    """True if a client that set this level is told: not every server heeds it."""
    if level is None or message["method"] != LOG:
        return True
    return is_at_least((message.get("params") or {}).get("level"), level)
