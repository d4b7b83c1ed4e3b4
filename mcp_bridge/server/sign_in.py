"""A call that waits for a person to sign in at its server, as clients can be told of it.

A client that declares elicitation by URL is asked to open one: with `input_required` by 2026-07-28,
by an error of its own by 2025-11-25. All others read the URL in the error that they get. The page
behind it asks who the person is: what comes back from a client proves nothing, and only has the
call made again. Pure.
"""

from __future__ import annotations

import secrets
from typing import Any

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import INTERACTIVE, LEGACY
from mcp_bridge.protocol.rpc import URL_NEEDED, Message, RpcError
from mcp_bridge.protocol.translation import to_input_required
from mcp_bridge.upstream.upstream import Unreachable, as_object

KEY = "tollgate/sign_in"
"""The key of our request among `inputRequests`, and of its answer."""
RESPONSES = "inputResponses"
MESSAGE = "Sign in at {server}, so that it can be asked in your name."


def opens_urls(capabilities: dict[str, Any]) -> bool:
    """True if a client said that its user can be shown a URL."""
    return isinstance(as_object(capabilities.get("elicitation")).get("url"), dict)


def without_answer(message: Message) -> Message:
    """Return a request without the answer to our own question, which is not for the server."""
    params = rpc.params_of(message)
    given = params.get(RESPONSES)
    if not isinstance(given, dict) or KEY not in given:
        return message
    left = {name: value for name, value in given.items() if name != KEY}
    kept = {name: value for name, value in params.items() if name != RESPONSES}
    return {**message, "params": {**kept, RESPONSES: left} if left else kept}


def asked_to_sign_in(
    error: RpcError, message: Message, envelope: Envelope, info: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the result that sends a client of the newer era to the sign-in page; None: it gets the
    error. It is asked once, and not while a server waits for answers."""
    method, params = message["method"], rpc.params_of(message)
    if not isinstance(error, Unreachable) or error.sign_in_url is None:
        return None
    was_asked = "requestState" in params or KEY in as_object(params.get(RESPONSES))
    if method not in INTERACTIVE or was_asked or not opens_urls(envelope.capabilities):
        return None
    request = {"method": "elicitation/create", "params": asked(error)}
    return to_input_required({KEY: request}, None, info)


def to_url_required(error: RpcError, version: str, capabilities: dict[str, Any]) -> RpcError:
    """Return the error for a client of the older era that knows such an error."""
    if not isinstance(error, Unreachable) or error.sign_in_url is None:
        return error
    if version != LEGACY or not opens_urls(capabilities):
        return error
    wanted = {**asked(error), "elicitationId": secrets.token_hex(16)}
    return RpcError(URL_NEEDED, error.message, {"elicitations": [wanted]})


def asked(error: Unreachable) -> dict[str, Any]:
    message = MESSAGE.format(server=error.server)
    return {"mode": "url", "message": message, "url": error.sign_in_url}
