"""Translates the messages of one era into those of the other. Pure; inputs are never changed.

Each is built of the members that its type and era have (`allowed_fields`, `questions`).

2025-11-25                                   2026-07-28
initialize, its answer                       server/discover, `_meta` of each request
a session's log level                        `_meta` logLevel of each request
elicitation/create, sampling, roots          input_required, inputResponses
resources/subscribe, the stream of a GET     subscriptions/listen
a result                                     with resultType, ttlMs, cacheScope, serverInfo
-32002 resource not found                    -32602
"""

from __future__ import annotations

from typing import Any

from mcp_bridge.protocol.allowed_fields import (
    RESULTS,
    SERVER_CAPABILITIES,
    from_server_notification,
    modern_client_capabilities,
    picked,
)
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import (
    CACHEABLE,
    CAPABILITIES_META,
    INFO_META,
    LEVEL_META,
    LIST_CHANGES,
    META,
    MODERN,
    RESOURCE_UPDATED,
    SERVER_META,
    SUBSCRIPTION_META,
    VERSION_META,
)
from mcp_bridge.protocol.questions import to_modern_questions
from mcp_bridge.protocol.rpc import (
    INVALID_PARAMS,
    RESOURCE_NOT_FOUND,
    Message,
    RpcError,
    meta_of,
    params_of,
)

LIST_CHANGED_CAPABILITIES = {
    "toolsListChanged": ("tools", "listChanged"),
    "promptsListChanged": ("prompts", "listChanged"),
    "resourcesListChanged": ("resources", "listChanged"),
}
CAPABILITIES_WITH_LISTS = ("tools", "prompts", "resources")


def to_modern_params(params: dict[str, Any], envelope: Envelope) -> dict[str, Any]:
    """Return the parameters with the caller's envelope, which each request of the newer era has."""
    kept = {name: value for name, value in params.items() if name != "_meta"}
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    meta[VERSION_META] = MODERN
    meta[CAPABILITIES_META] = modern_client_capabilities(envelope.capabilities)
    if envelope.info is not None:
        meta[INFO_META] = envelope.info
    if envelope.level is not None:
        meta[LEVEL_META] = envelope.level
    return {**kept, "_meta": meta}


def to_modern_result(
    method: str, result: dict[str, Any], server_info: dict[str, Any]
) -> dict[str, Any]:
    """Return a complete result of 2026-07-28, built of the members that it may have.

    It may be kept for no time unless the server says for how long, and by its client alone: others
    may not be shown the same.
    """
    found = {"resultType": "complete", **picked(result, RESULTS.get(method, ()))}
    if method in CACHEABLE:
        found |= {"ttlMs": result.get("ttlMs", 0), "cacheScope": "private"}
    found["_meta"] = {**meta_of(result), SERVER_META: server_info}
    return found


def to_input_required(
    requests: dict[str, Message], state: str | None, server_info: dict[str, Any]
) -> dict[str, Any]:
    """Return the result that asks a client of 2026-07-28. `state`: ours; None: none comes back."""
    found: dict[str, Any] = {
        "resultType": "input_required",
        "inputRequests": to_modern_questions(requests),
    }
    if state is not None:
        found["requestState"] = state
    return {**found, "_meta": {SERVER_META: server_info}}


def to_legacy_result(method: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result of the older era, built of the members that it may have."""
    meta = {name: value for name, value in meta_of(result).items() if not name.startswith(META)}
    kept = picked(result, RESULTS.get(method, ()))
    return {**kept, "_meta": meta} if meta else kept


def to_modern_error(method: str, params: dict[str, Any], error: RpcError) -> RpcError:
    if method == "resources/read" and error.code == RESOURCE_NOT_FOUND:
        data = error.data if isinstance(error.data, dict) else {}
        return RpcError(INVALID_PARAMS, error.message, {"uri": params.get("uri"), **data})
    return error


def to_legacy_error(method: str, params: dict[str, Any], error: RpcError) -> RpcError:
    """Return RESOURCE_NOT_FOUND for a missing resource, which the newer era reports as
    INVALID_PARAMS with the URI in its data."""
    data = error.data if isinstance(error.data, dict) else {}
    is_missing = error.code == INVALID_PARAMS and data.get("uri") == params.get("uri")
    if method in ("resources/read", "resources/subscribe") and is_missing:
        return RpcError(RESOURCE_NOT_FOUND, error.message, error.data)
    return error


def server_capabilities(
    found: list[dict[str, Any]], *, legacy: bool, list_changed: bool = False
) -> dict[str, Any]:
    """Return the joined capabilities of servers for a client of one era.

    `list_changed`: declare changes of lists, whatever the servers declare.
    """
    merged: dict[str, Any] = {}
    for name, known in SERVER_CAPABILITIES.items():
        given = [each[name] for each in found if isinstance(each.get(name), dict)]
        if not given and not (name == "logging" and legacy):
            continue
        if name == "logging" and not legacy:
            continue
        flags = {flag for each in given for flag in known if each.get(flag) is True}
        if list_changed and name in CAPABILITIES_WITH_LISTS:
            flags.add("listChanged")
        merged[name] = dict.fromkeys(sorted(flags), True)
    return merged


def supported_filter(wanted: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a `subscriptions/listen` that a server of the older era can serve."""
    found: dict[str, Any] = {}
    for flag, (kind, member) in LIST_CHANGED_CAPABILITIES.items():
        offered = capabilities.get(kind)
        if wanted.get(flag) is True and isinstance(offered, dict) and offered.get(member) is True:
            found[flag] = True
    resources = capabilities.get("resources")
    uris = wanted.get("resourceSubscriptions")
    if uris and isinstance(resources, dict) and resources.get("subscribe") is True:
        found["resourceSubscriptions"] = list(uris)
    return found


def is_wanted(message: Message, wanted: dict[str, Any]) -> bool:
    """True if the client's filter asks for this notification."""
    method = message.get("method")
    if method == RESOURCE_UPDATED:
        return params_of(message).get("uri") in wanted.get("resourceSubscriptions", ())
    flag = LIST_CHANGES.get(str(method))
    return flag is not None and wanted.get(flag) is True


def belongs_to(message: Message, params: dict[str, Any]) -> bool:
    """True if a notification may be sent on the stream of a request with `params`.

    Progress must have its token. Cancellations are dropped: their ids are ours, not the client's.
    """
    if message.get("method") == "notifications/cancelled":
        return False
    if message.get("method") != "notifications/progress":
        return True
    token = meta_of(params).get("progressToken")
    found = params_of(message).get("progressToken")
    return found == token and type(found) is type(token)


def to_modern_notification(message: Message, subscription: Any) -> Message | None:
    """Return a notification for the stream of one `subscriptions/listen`; None: there is none."""
    found = from_server_notification(message, legacy=False)
    if found is None:
        return None
    params = params_of(found)
    meta = {**meta_of(params), SUBSCRIPTION_META: subscription}
    return {**found, "params": {**params, "_meta": meta}}
