"""Translates the messages of one era into those of the other. Pure; inputs are never changed.

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

from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import (
    CACHEABLE,
    CAPABILITIES_META,
    INFO_META,
    LEVEL_META,
    LIST_CHANGES,
    META,
    MODERN,
    NEEDED_CAPABILITY,
    RESOURCE_UPDATED,
    SERVER_META,
    SUBSCRIPTION_META,
    VERSION_META,
)
from mcp_bridge.protocol.rpc import (
    INVALID_PARAMS,
    MISSING_CAPABILITY,
    RESOURCE_NOT_FOUND,
    Message,
    RpcError,
    meta_of,
    params_of,
)

MODERN_RESULT_FIELDS = ("resultType", "ttlMs", "cacheScope", "requestState", "inputRequests")
MODERN_PARAM_FIELDS = ("inputResponses", "requestState")
FORWARDED_META = frozenset({"progressToken"})
"""The only member of a client's `_meta` that servers get: the others concern us and the client."""
LIST_CHANGED_CAPABILITIES = {
    "toolsListChanged": ("tools", "listChanged"),
    "promptsListChanged": ("prompts", "listChanged"),
    "resourcesListChanged": ("resources", "listChanged"),
}
LEGACY_CAPABILITIES: dict[str, tuple[str, ...]] = {
    "elicitation": ("form", "url"),
    "sampling": ("context", "tools"),
    "roots": (),
}
"""Client capabilities of the older era, each with its flags."""
CAPABILITIES_WITH_LISTS = ("tools", "prompts", "resources")
SERVER_CAPABILITIES = ("tools", "prompts", "resources", "completions", "logging")


def without_reserved(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without what 2026-07-28 adds to them and their `_meta`."""
    kept = {name: value for name, value in params.items() if name not in MODERN_PARAM_FIELDS}
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    kept.pop("_meta", None)
    return {**kept, "_meta": meta} if meta else kept


def for_server(content: dict[str, Any]) -> dict[str, Any]:
    """Return a client's parameters or answer with only FORWARDED_META in `_meta`: servers do not
    get the tokens, traces and other values that a client sends to us there."""
    kept = {name: value for name, value in content.items() if name != "_meta"}
    meta = {name: value for name, value in meta_of(content).items() if name in FORWARDED_META}
    answers = content.get("inputResponses")
    if isinstance(answers, dict):
        kept["inputResponses"] = {
            key: for_server(each) if isinstance(each, dict) else each
            for key, each in answers.items()
        }
    return {**kept, "_meta": meta} if meta else kept


def answer_for_server(answered: Message) -> Message:
    """Return the `result` or `error` of a client's response."""
    if "error" in answered:
        return {"error": answered["error"]}
    result = answered.get("result")
    return {"result": for_server(result) if isinstance(result, dict) else result}


def to_modern_params(params: dict[str, Any], envelope: Envelope) -> dict[str, Any]:
    """Return the parameters with the caller's envelope, which each request of the newer era has."""
    kept = {name: value for name, value in params.items() if name != "_meta"}
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    meta[VERSION_META] = MODERN
    meta[CAPABILITIES_META] = envelope.capabilities
    if envelope.info is not None:
        meta[INFO_META] = envelope.info
    if envelope.level is not None:
        meta[LEVEL_META] = envelope.level
    return {**kept, "_meta": meta}


def to_modern_result(
    method: str, result: dict[str, Any], server_info: dict[str, Any]
) -> dict[str, Any]:
    """Return a result of 2026-07-28: `complete` unless it says otherwise; cacheable for no time
    unless the server says for how long."""
    found = {"resultType": "complete", **result}
    if method in CACHEABLE and found["resultType"] == "complete":
        found = {"ttlMs": 0, "cacheScope": "private", **found}
    found["_meta"] = {**meta_of(found), SERVER_META: server_info}
    return found


def to_legacy_result(result: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in result.items() if name not in MODERN_RESULT_FIELDS}
    meta = {name: value for name, value in meta_of(result).items() if not name.startswith(META)}
    kept.pop("_meta", None)
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


def check_requests(requests: Any, capabilities: dict[str, Any]) -> dict[str, Message]:
    """Return a server's requests to the client, by key. Raises: RpcError, for an unknown request or
    one that the client did not declare."""
    if not isinstance(requests, dict) or not all(isinstance(r, dict) for r in requests.values()):
        raise RpcError(INVALID_PARAMS, "inputRequests: an object of requests is wanted")
    for request in requests.values():
        check_capability(str(request.get("method")), capabilities)
    return requests


def check_capability(method: str, capabilities: dict[str, Any]) -> None:
    """Raises: RpcError, if the client did not declare the capability for this request."""
    needed = NEEDED_CAPABILITY.get(method)
    if needed is None:
        raise RpcError(INVALID_PARAMS, f"{method}: not a request that a server may send")
    if not isinstance(capabilities.get(needed), dict):
        missing: dict[str, Any] = {"requiredCapabilities": {needed: {}}}
        raise RpcError(MISSING_CAPABILITY, f"The client does not declare {needed}", missing)


def to_legacy_capabilities(capabilities: dict[str, Any]) -> dict[str, Any]:
    """Return a client's capabilities as the handshake of the older era declares them.

    `listChanged` of roots is left out, since nobody would send the notification. So are unknown
    capabilities: clients that differ only in those share a session at a server.
    """
    return {
        name: {flag: {} for flag in flags if isinstance(capabilities[name].get(flag), dict)}
        for name, flags in LEGACY_CAPABILITIES.items()
        if isinstance(capabilities.get(name), dict)
    }


def server_capabilities(
    found: list[dict[str, Any]], *, legacy: bool, list_changed: bool = False
) -> dict[str, Any]:
    """Return the joined capabilities of servers for a client of one era.

    `list_changed`: declare changes of lists, whatever the servers declare.
    """
    merged: dict[str, Any] = {}
    for name in SERVER_CAPABILITIES:
        given = [each[name] for each in found if isinstance(each.get(name), dict)]
        if not given and not (name == "logging" and legacy):
            continue
        if name == "logging" and not legacy:
            continue
        flags = {flag for each in given for flag, value in each.items() if value is True}
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


def to_modern_notification(message: Message, subscription: Any) -> Message:
    """Return a notification for the stream of one `subscriptions/listen`."""
    params = params_of(message)
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    return {**message, "params": {**params, "_meta": {**meta, SUBSCRIPTION_META: subscription}}}


def to_legacy_notification(message: Message) -> Message:
    """Return a notification without the fields of 2026-07-28."""
    return {**message, "params": without_reserved(params_of(message))}
