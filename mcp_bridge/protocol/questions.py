"""Reads what a server asks of its client, and translates it between the eras: elicitation by form
or by URL, sampling with or without tools, roots.

A client is asked only what it declared, by mode. Pure.
"""

from __future__ import annotations

import secrets
from typing import Any

from mcp_bridge.protocol.allowed_fields import is_web_url, picked, with_own_meta
from mcp_bridge.protocol.rpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_CAPABILITY,
    Message,
    RpcError,
    params_of,
)

ELICIT, SAMPLE, ROOTS = "elicitation/create", "sampling/createMessage", "roots/list"
URL, FORM = "url", "form"
SAMPLE_FIELDS = (
    *("messages", "modelPreferences", "systemPrompt", "temperature", "maxTokens", "stopSequences"),
    *("metadata", "tools", "toolChoice", "includeContext"),
)
ELICIT_FIELDS = {
    FORM: ("mode", "message", "requestedSchema"),
    URL: ("mode", "message", "url", "elicitationId"),
}
TOOL_CONTENT = ("tool_use", "tool_result")


class DeclinedQuestion(RpcError):
    """A question that its client is not asked. `reason`: for the record."""

    def __init__(self, code: int, message: str, method: str, reason: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.method, self.reason = method, reason

    def for_legacy_server(self) -> dict[str, Any]:
        """Return the error object that a server of the older era gets for its request."""
        code = self.code
        if code == MISSING_CAPABILITY:
            # client/elicitation: -32602 for a mode that is not declared.
            code = INVALID_PARAMS if "." in self.reason else METHOD_NOT_FOUND
        return {"code": code, "message": self.message}


def undeclared(method: str, capability: str, flag: str | None = None) -> DeclinedQuestion:
    named = capability if flag is None else f"{capability}.{flag}"
    wanted: dict[str, Any] = {capability: {} if flag is None else {flag: {}}}
    return DeclinedQuestion(
        MISSING_CAPABILITY,
        f"The client does not declare {named}",
        method,
        f"undeclared:{named}",
        {"requiredCapabilities": wanted},
    )


def malformed(method: str, why: str) -> DeclinedQuestion:
    return DeclinedQuestion(INVALID_PARAMS, f"{method}: {why}", method, "malformed")


def from_server_question(request: Message, capabilities: dict[str, Any]) -> Message:
    """Return what a server asks, as far as its method has it: `method` and `params`.

    Raises: DeclinedQuestion, for what is no question, or one that the client did not declare.
    """
    method, params = request.get("method"), request.get("params", {})
    if method not in (ELICIT, SAMPLE, ROOTS):
        shown = method if isinstance(method, str) else "method"
        error = malformed(shown[:64], "not a request that a server may send")
        error.reason = "no_question"
        raise error
    if not isinstance(params, dict):
        raise malformed(method, "params must be an object")
    if method == ELICIT:
        kept = elicitation(params, capabilities)
    elif method == SAMPLE:
        kept = sampling(params, capabilities)
    else:
        kept = {}
        needed(ROOTS, "roots", capabilities)
    return {"method": method, "params": with_own_meta(kept, params)}


def needed(method: str, capability: str, capabilities: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a capability. Raises: DeclinedQuestion."""
    found = capabilities.get(capability)
    if not isinstance(found, dict):
        raise undeclared(method, capability)
    return found


def declares_form(elicitation: dict[str, Any]) -> bool:
    """True if a client takes forms: one that names no mode means them (client/elicitation)."""
    return isinstance(elicitation.get(FORM), dict) or URL not in elicitation


def elicitation(params: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    mode = asked_mode(params, capabilities)
    if mode == URL and not is_web_url(params.get("url")):
        raise malformed(ELICIT, "url: no http or https URL")
    return picked(params, ELICIT_FIELDS[mode])


def asked_mode(params: dict[str, Any], capabilities: dict[str, Any]) -> str:
    """Return the mode of an elicitation. Raises: DeclinedQuestion, where the client does not
    declare it."""
    declared, mode = needed(ELICIT, "elicitation", capabilities), params.get("mode", FORM)
    if mode not in (FORM, URL):
        raise malformed(ELICIT, "mode: neither form nor url")
    if mode == FORM and not declares_form(declared):
        raise undeclared(ELICIT, "elicitation", FORM)
    if mode == URL and not isinstance(declared.get(URL), dict):
        raise undeclared(ELICIT, "elicitation", URL)
    return str(mode)


def sampling(params: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters; without `includeContext` where the client declares no context, which
    a client of an older revision would be free to ignore."""
    declared = needed(SAMPLE, "sampling", capabilities)
    if wants_tools(params) and not isinstance(declared.get("tools"), dict):
        raise undeclared(SAMPLE, "sampling", "tools")
    kept = picked(params, SAMPLE_FIELDS)
    if not isinstance(declared.get("context"), dict):
        kept.pop("includeContext", None)
    return kept


def wants_tools(params: dict[str, Any]) -> bool:
    """True if a model is to call tools, or reads of calls of them."""
    if params.get("tools") or params.get("toolChoice"):
        return True
    messages = params.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else (content,):
            if isinstance(part, dict) and part.get("type") in TOOL_CONTENT:
                return True
    return False


def from_server_questions(requests: Any, capabilities: dict[str, Any]) -> dict[str, Message]:
    """Return a server's `inputRequests`, by key. Raises: RpcError."""
    if requests is None:
        return {}
    if not isinstance(requests, dict) or not all(isinstance(r, dict) for r in requests.values()):
        raise RpcError(INVALID_PARAMS, "inputRequests: an object of requests is wanted")
    return {key: from_server_question(each, capabilities) for key, each in requests.items()}


# For clients.


def to_legacy_params(request: Message) -> dict[str, Any]:
    """Return a question's parameters for a client of the older era, which wants an id of each URL
    that is to be opened."""
    params = params_of(request)
    if params.get("mode") == URL and not isinstance(params.get("elicitationId"), str):
        return {**params, "elicitationId": secrets.token_hex(16)}
    return params


def to_modern_questions(requests: dict[str, Message]) -> dict[str, Message]:
    """Return questions for a client of the newer era, which knows no id of an elicitation."""
    found = {}
    for key, request in requests.items():
        params = params_of(request)
        kept = {name: value for name, value in params.items() if name != "elicitationId"}
        found[key] = {"method": request["method"], "params": kept}
    return found
