"""Translates the messages of one era into those of the other. Pure: dicts in, dicts out, and
nothing that came in is changed.

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
from mcp_bridge.protocol.inbound import Envelope
from mcp_bridge.protocol.rpc import (
    INVALID_PARAMS,
    MISSING_CAPABILITY,
    RESOURCE_NOT_FOUND,
    Message,
    RpcError,
    meta_of,
    params_of,
)

OF_MODERN_RESULTS = ("resultType", "ttlMs", "cacheScope", "requestState", "inputRequests")
OF_MODERN_PARAMS = ("inputResponses", "requestState")
PASSED_META = frozenset({"progressToken"})
"""Of a request's `_meta`; what else the protocol has there is of one leg of the way."""
LIST_CHANGED_OF = {
    "toolsListChanged": ("tools", "listChanged"),
    "promptsListChanged": ("prompts", "listChanged"),
    "resourcesListChanged": ("resources", "listChanged"),
}
LEGACY_ABILITIES: dict[str, tuple[str, ...]] = {
    "elicitation": ("form", "url"),
    "sampling": ("context", "tools"),
    "roots": (),
}
"""Of a client, with what each may consist of."""
LISTED = ("tools", "prompts", "resources")
SERVER_CAPABILITIES = ("tools", "prompts", "resources", "completions", "logging")


def without_reserved(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without what of `_meta` and them only one leg of the way is meant to
    know."""
    kept = {name: value for name, value in params.items() if name not in OF_MODERN_PARAMS}
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    kept.pop("_meta", None)
    return {**kept, "_meta": meta} if meta else kept


def for_server(said: dict[str, Any]) -> dict[str, Any]:
    """A client's parameters or its answer, with nothing in `_meta` but the protocol's own: what a
    client tells us there (tokens, traces, whatever it likes) is told no server."""
    kept = {name: value for name, value in said.items() if name != "_meta"}
    meta = {name: value for name, value in meta_of(said).items() if name in PASSED_META}
    answers = said.get("inputResponses")
    if isinstance(answers, dict):
        kept["inputResponses"] = {
            key: for_server(each) if isinstance(each, dict) else each
            for key, each in answers.items()
        }
    return {**kept, "_meta": meta} if meta else kept


def answer_for_server(answered: Message) -> Message:
    """Return what a client answered, without what makes a message of it."""
    if "error" in answered:
        return {"error": answered["error"]}
    result = answered.get("result")
    return {"result": for_server(result) if isinstance(result, dict) else result}


def to_modern_params(params: dict[str, Any], envelope: Envelope) -> dict[str, Any]:
    """Return the parameters with the caller's own capabilities, as a server of the newer era wants
    each request."""
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
    """Complete, if it does not say otherwise; and what may be kept, if the server does not say for
    how long, is good for this once."""
    found = {"resultType": "complete", **result}
    if method in CACHEABLE and found["resultType"] == "complete":
        found = {"ttlMs": 0, "cacheScope": "private", **found}
    found["_meta"] = {**meta_of(found), SERVER_META: server_info}
    return found


def to_legacy_result(result: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in result.items() if name not in OF_MODERN_RESULTS}
    meta = {name: value for name, value in meta_of(result).items() if not name.startswith(META)}
    kept.pop("_meta", None)
    return {**kept, "_meta": meta} if meta else kept


def to_modern_error(method: str, params: dict[str, Any], error: RpcError) -> RpcError:
    if method == "resources/read" and error.code == RESOURCE_NOT_FOUND:
        data = error.data if isinstance(error.data, dict) else {}
        return RpcError(INVALID_PARAMS, error.message, {"uri": params.get("uri"), **data})
    return error


def to_legacy_error(method: str, params: dict[str, Any], error: RpcError) -> RpcError:
    """A read is refused for its parameters where they do not name a resource, and so is a
    subscription: the newer era tells this from others by the URI in its data."""
    data = error.data if isinstance(error.data, dict) else {}
    is_missing = error.code == INVALID_PARAMS and data.get("uri") == params.get("uri")
    if method in ("resources/read", "resources/subscribe") and is_missing:
        return RpcError(RESOURCE_NOT_FOUND, error.message, error.data)
    return error


def check_asked(asked: Any, capabilities: dict[str, Any]) -> dict[str, Message]:
    """Return what a server asks of the client, by key: only what there is, and what the client said
    that it can. Raises: RpcError."""
    if not isinstance(asked, dict) or not all(isinstance(each, dict) for each in asked.values()):
        raise RpcError(INVALID_PARAMS, "inputRequests: an object of requests is wanted")
    for request in asked.values():
        check_can(str(request.get("method")), capabilities)
    return asked


def check_can(method: str, capabilities: dict[str, Any]) -> None:
    """Raises: RpcError, for a request to a client that never said it could."""
    needed = NEEDED_CAPABILITY.get(method)
    if needed is None:
        raise RpcError(INVALID_PARAMS, f"{method}: nothing that a server may ask")
    if not isinstance(capabilities.get(needed), dict):
        missing: dict[str, Any] = {"requiredCapabilities": {needed: {}}}
        raise RpcError(MISSING_CAPABILITY, f"The client does not declare {needed}", missing)


def to_legacy_capabilities(capabilities: dict[str, Any]) -> dict[str, Any]:
    """A client's, as the older era's handshake has them: what it can, it can during a call alone;
    of roots that change nobody would tell. Nothing but what that era knows: what differs in
    anything else differs in nothing, and needs no session of its own."""
    return {
        name: {flag: {} for flag in flags if isinstance(capabilities[name].get(flag), dict)}
        for name, flags in LEGACY_ABILITIES.items()
        if isinstance(capabilities.get(name), dict)
    }


def server_capabilities(
    found: list[dict[str, Any]], *, legacy: bool, tells: bool = False
) -> dict[str, Any]:
    """Return what servers can, together, as we say it to a client of one era.

    `tells`: it is told when a list is another, whatever the server says of itself.
    """
    merged: dict[str, Any] = {}
    for name in SERVER_CAPABILITIES:
        given = [each[name] for each in found if isinstance(each.get(name), dict)]
        if not given and not (name == "logging" and legacy):
            continue
        if name == "logging" and not legacy:
            continue
        flags = {flag for each in given for flag, value in each.items() if value is True}
        if tells and name in LISTED:
            flags.add("listChanged")
        merged[name] = dict.fromkeys(sorted(flags), True)
    return merged


def honoured(wanted: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    """The part of a `subscriptions/listen` that a server of the older era can serve."""
    found: dict[str, Any] = {}
    for flag, (kind, what) in LIST_CHANGED_OF.items():
        offered = capabilities.get(kind)
        if wanted.get(flag) is True and isinstance(offered, dict) and offered.get(what) is True:
            found[flag] = True
    resources = capabilities.get("resources")
    uris = wanted.get("resourceSubscriptions")
    if uris and isinstance(resources, dict) and resources.get("subscribe") is True:
        found["resourceSubscriptions"] = list(uris)
    return found


def is_wanted(message: Message, wanted: dict[str, Any]) -> bool:
    """True if a change is one that the client asked to hear of."""
    method = message.get("method")
    if method == RESOURCE_UPDATED:
        return params_of(message).get("uri") in wanted.get("resourceSubscriptions", ())
    flag = LIST_CHANGES.get(str(method))
    return flag is not None and wanted.get(flag) is True


def is_of(message: Message, params: dict[str, Any]) -> bool:
    """True if a notification may stand on the stream of a request with `params`: progress has its
    own token, and what a server cancels has an id that means something else to the client."""
    if message.get("method") == "notifications/cancelled":
        return False
    if message.get("method") != "notifications/progress":
        return True
    token = meta_of(params).get("progressToken")
    said = params_of(message).get("progressToken")
    return said == token and type(said) is type(token)


def to_subscribed(message: Message, subscription: Any) -> Message:
    """A change as it stands on the stream of one `subscriptions/listen`."""
    params = params_of(message)
    meta = {name: value for name, value in meta_of(params).items() if not name.startswith(META)}
    return {**message, "params": {**params, "_meta": {**meta, SUBSCRIPTION_META: subscription}}}


def to_unsubscribed(message: Message) -> Message:
    """A change as it stands on the stream of a session."""
    return {**message, "params": without_reserved(params_of(message))}
