"""Lists the members that each message may have, by its type and era, and builds messages of those
alone.

What a server sends is data for its client: it names no state, result type, question or capability
of an era that it does not speak, and nothing that is this gateway's to say. Members that are in no
list are dropped; so are members of `_meta` whose names the specification reserves ("General
fields", `_meta`) or that begin with `tollgate/`. What is in `structuredContent`, in the parts of
`content` and in other members of `_meta` is the server's own, and stays. Pure.

Sources: schema/2025-11-25 and schema/2026-07-28 of the specification; a test compares the lists
with the SDK's tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mcp_bridge.protocol.eras import CACHEABLE, INTERACTIVE
from mcp_bridge.protocol.rpc import (
    INTERNAL_ERROR,
    MISSING_CAPABILITY,
    REQUEST_CANCELLED,
    URL_NEEDED,
    Message,
    RpcError,
    from_error,
    meta_of,
    notification,
    params_of,
)

OWN_PREFIX = "tollgate/"
"""Members of `_meta` that we alone set."""
RESERVED_LABELS = frozenset({"modelcontextprotocol", "mcp"})
RESULTS: Mapping[str, tuple[str, ...]] = {
    "tools/call": ("content", "structuredContent", "isError"),
    "tools/list": ("tools", "nextCursor"),
    "prompts/get": ("description", "messages"),
    "prompts/list": ("prompts", "nextCursor"),
    "resources/list": ("resources", "nextCursor"),
    "resources/templates/list": ("resourceTemplates", "nextCursor"),
    "resources/read": ("contents",),
    "completion/complete": ("completion",),
    "server/discover": ("supportedVersions", "capabilities", "instructions"),
}
"""The members of results that both eras have; results of other methods have none."""
REQUESTS: Mapping[str, tuple[str, ...]] = {
    "tools/call": ("name", "arguments"),
    "tools/list": ("cursor",),
    "prompts/get": ("name", "arguments"),
    "prompts/list": ("cursor",),
    "resources/list": ("cursor",),
    "resources/templates/list": ("cursor",),
    "resources/read": ("uri",),
    "resources/subscribe": ("uri",),
    "resources/unsubscribe": ("uri",),
    "completion/complete": ("ref", "argument", "context"),
    "logging/setLevel": ("level",),
    "subscriptions/listen": ("notifications",),
}
"""The parameters of a client's requests in both eras."""
CONTINUED = ("inputResponses", "requestState")
"""The parameters of 2026-07-28 with which a request goes on."""
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "elicitation/create": ("action", "content"),
    "sampling/createMessage": ("content", "model", "role", "stopReason"),
    "roots/list": ("roots",),
}
"""The members of a client's answers to a server's questions."""
ANY_ANSWER = tuple(name for names in ANSWERS.values() for name in names)
"""Those of any answer, for where it is not known any more what was asked."""
LISTS_CHANGED = (
    "notifications/tools/list_changed",
    "notifications/prompts/list_changed",
    "notifications/resources/list_changed",
)
NOTIFICATIONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(LISTS_CHANGED, ()),
    "notifications/message": ("level", "logger", "data"),
    "notifications/progress": ("progressToken", "progress", "total", "message"),
    "notifications/resources/updated": ("uri",),
}
"""The parameters of a server's notifications in both eras."""
LEGACY_NOTIFICATIONS: Mapping[str, tuple[str, ...]] = {
    **NOTIFICATIONS,
    "notifications/elicitation/complete": ("elicitationId",),
}
PASSED_EXTENSIONS = frozenset({"io.modelcontextprotocol/ui"})
"""Extensions of a client that need nothing but `_meta` and resources of the bridge."""
CLIENT_CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "elicitation": ("form", "url"),
    "sampling": ("context", "tools"),
    "roots": (),
}
"""Capabilities of clients in both eras, each with its flags."""
SERVER_CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "tools": ("listChanged",),
    "prompts": ("listChanged",),
    "resources": ("subscribe", "listChanged"),
    "completions": (),
    "logging": (),
}
MEANT_CODES = range(-32042, -32019)
"""Codes to which an era, or this gateway, gives a meaning."""
OTHER_MEANT_CODES = frozenset({REQUEST_CANCELLED})
OUR_DATA = ("server", "reason", "url")
"""Members with which the data of our own INTERNAL_ERROR says what to do."""
MAX_CODE = 2**31
NOTHING_DECLARED: Mapping[str, Any] = {}
MAX_URLS = 8
"""URLs that one error may want to be opened."""
MAX_URL_TEXT = 8_192
WEB_URL = re.compile(r"https?://[^\x00-\x20\x7f/?#\\]+[^\x00-\x20\x7f\\]*", re.IGNORECASE)


def picked(content: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: content[name] for name in names if name in content}


def is_reserved(name: str) -> bool:
    """True if a member of `_meta` has a name that the specification or this gateway reserves."""
    prefix, slash, _ = name.partition("/")
    if not slash:
        return name == "progressToken"
    labels = prefix.lower().split(".")[:2]
    return name.startswith(OWN_PREFIX) or not RESERVED_LABELS.isdisjoint(labels)


def with_own_meta(built: dict[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was built of a server's `content`, with the members of its `_meta` that are the
    server's to set."""
    found = content.get("_meta")
    if isinstance(found, dict):
        meta = {name: value for name, value in found.items() if not is_reserved(name)}
        if meta:
            built["_meta"] = meta
    return built


# From servers.


def from_server_result(method: str, result: dict[str, Any], *, modern: bool) -> dict[str, Any]:
    """Return a complete result without what is not a server's to say.

    Of the newer era how long it may be kept stays: `ttlMs`.
    """
    found = picked(result, RESULTS.get(method, ()))
    ttl_ms = result.get("ttlMs")
    if modern and method in CACHEABLE and type(ttl_ms) is int and ttl_ms >= 0:
        found["ttlMs"] = ttl_ms
    return with_own_meta(found, result)


def from_server_notification(message: Message, *, legacy: bool) -> Message | None:
    """Return a server's notification as a client gets it, of the older era if `legacy`; None: the
    era has no such notification."""
    method = message["method"]
    names = (LEGACY_NOTIFICATIONS if legacy else NOTIFICATIONS).get(method)
    if names is None:
        return None
    params = with_own_meta(picked(params_of(message), names), params_of(message))
    return notification(method, params) if params else notification(method)


def from_server_error(
    error: Any, *, modern: bool, declared: Mapping[str, Any] = NOTHING_DECLARED
) -> RpcError:
    """Return the error that a server sent. `declared`: the client's capabilities.

    Codes that are another's to use are INTERNAL_ERROR: those of the era that the server does not
    speak, of headers and versions, which are between it and us, and of this gateway. That a client
    lacks a capability is passed on where it does: clients of both eras have the same ones.
    """
    found = from_error(error)
    code = found.code
    if type(code) is not int or abs(code) >= MAX_CODE:
        return RpcError(INTERNAL_ERROR, found.message)
    if code == MISSING_CAPABILITY:
        data = found.data if isinstance(found.data, dict) else {}
        wanted = lacking(client_capabilities(data.get("requiredCapabilities")), declared)
        if wanted:
            return RpcError(code, found.message, {"requiredCapabilities": wanted})
    if code == URL_NEEDED and not modern:
        urls = wanted_urls(found.data)
        return RpcError(code if urls else INTERNAL_ERROR, found.message, urls)
    if code == INTERNAL_ERROR and isinstance(found.data, dict):
        data = {name: value for name, value in found.data.items() if name not in OUR_DATA}
        return RpcError(code, found.message, data or None)
    if code in MEANT_CODES or code in OTHER_MEANT_CODES:
        return RpcError(INTERNAL_ERROR, found.message)
    return found


def lacking(wanted: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the wanted capabilities that a client does not declare, with their flags."""
    return {
        name: flags
        for name, flags in wanted.items()
        if not isinstance(declared.get(name), dict)
        or any(not isinstance(declared[name].get(flag), dict) for flag in flags)
    }


def wanted_urls(data: Any) -> dict[str, Any] | None:
    """Return the data of URL_NEEDED; None: no such data."""
    found = data.get("elicitations") if isinstance(data, dict) else None
    if not isinstance(found, list) or not 0 < len(found) <= MAX_URLS:
        return None
    names = ("message", "url", "elicitationId")
    urls = [picked(each, names) if isinstance(each, dict) else {} for each in found]
    for each in urls:
        if any(not is_short_text(each.get(name)) for name in names):
            return None
        if not is_web_url(each["url"]):
            return None
    return {"elicitations": [{"mode": "url", **each} for each in urls]}


def is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_URL_TEXT


def is_web_url(value: Any) -> bool:
    """True for a URL that a person may be asked to open: of the web, never a script, a file or a
    program of theirs."""
    return isinstance(value, str) and len(value) <= MAX_URL_TEXT and bool(WEB_URL.fullmatch(value))


# From clients.


def from_client_params(method: str, params: dict[str, Any], *, modern: bool) -> dict[str, Any]:
    """Return the parameters of a client's request, as far as its era has them, and its `_meta`."""
    names = REQUESTS.get(method, ())
    if modern and method in INTERACTIVE:
        names += CONTINUED
    kept = picked(params, (*names, "_meta"))
    if kept.get("arguments", kept) is None:
        del kept["arguments"]  # the same as none, and no object
    return kept


def for_server(method: str, params: dict[str, Any], *, modern: bool) -> dict[str, Any]:
    """Return a client's parameters for a server of an era.

    Of `_meta` the progress token alone stays: servers do not get the tokens, traces and other
    values that a client sends to us there.
    """
    kept = from_client_params(method, params, modern=modern)
    meta = picked(meta_of(kept), ("progressToken",))
    kept.pop("_meta", None)
    answers = kept.get("inputResponses")
    if isinstance(answers, dict):
        kept["inputResponses"] = {
            key: picked(each, ANY_ANSWER) if isinstance(each, dict) else each
            for key, each in answers.items()
        }
    return {**kept, "_meta": meta} if meta else kept


def answer_for_server(method: str, answered: Message) -> Message:
    """Return the `result` or `error` of a client's response to a server's request."""
    if "error" in answered:
        return {"error": from_error(answered["error"]).to_error()}
    result = answered.get("result")
    return {"result": picked(result, ANSWERS.get(method, ())) if isinstance(result, dict) else {}}


def client_capabilities(found: Any) -> dict[str, Any]:
    """Return the capabilities that servers may be told of, or may want, and no others: clients that
    differ only in those share a session at a server. `listChanged` of roots is none of them, since
    nobody would send the notification."""
    if not isinstance(found, dict):
        return {}
    return {
        name: {flag: {} for flag in flags if isinstance(found[name].get(flag), dict)}
        for name, flags in CLIENT_CAPABILITIES.items()
        if isinstance(found.get(name), dict)
    }


def modern_client_capabilities(found: dict[str, Any]) -> dict[str, Any]:
    """Return the capabilities of a client with the extensions that need nothing of the bridge."""
    kept = client_capabilities(found)
    extensions = found.get("extensions")
    if isinstance(extensions, dict):
        passed = {name: each for name, each in extensions.items() if name in PASSED_EXTENSIONS}
        kept |= {"extensions": passed} if passed else {}
    return kept
