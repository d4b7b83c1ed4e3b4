"""JSON-RPC 2.0 as MCP uses it: one message per body.

Pure. A message is the plain dict that was on the wire, so members of later revisions pass through.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foundation.json_numbers import slow_number
from foundation.json_values import has_more_values
from mcp_bridge.protocol.repeated_keys import KeyRepeated, without_repeats

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
RESOURCE_NOT_FOUND = -32002
"""Used up to 2025-11-25; later revisions say INVALID_PARAMS."""
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022
URL_NEEDED = -32042
"""The URL_ELICITATION_REQUIRED of 2025-11-25."""
REQUEST_CANCELLED = -32800
"""The error that ends the stream of a cancelled call, since a stream ends with an answer."""
TOO_MANY = -32000
DENIED = -32030
APPROVAL_NEEDED = -32031
LIMITED = -32032
"""TOO_MANY, DENIED, APPROVAL_NEEDED and LIMITED are our own, from the range that JSON-RPC leaves to
servers. docs/mcp.md lists all codes."""

MAX_METHOD_LENGTH = 128
MAX_ID_LENGTH = 256
MAX_ERROR_TEXT = 2000
"""Characters of an upstream's error message that are passed on."""
MAX_SERVER_VALUES = 500_000
"""Bounds the values in one message of a server, which may list 20,000 things at once. Decoding so
many holds the event loop for 0.13 s at most (entries of one object)."""
TOO_MANY_VALUES = "too_many_values"
"""The `reason` of the error."""

Message = dict[str, Any]
RequestId = str | int

STATUS = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    MISSING_CAPABILITY: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}
"""The HTTP status of a response that is one error, in 2026-07-28; 200 for all other codes."""


class RpcError(Exception):
    """An error object that answers a request. `status`: of the HTTP response; None: by the code."""

    def __init__(
        self, code: int, message: str, data: Any = None, *, status: int | None = None
    ) -> None:
        super().__init__(code, message)
        self.code, self.message, self.data, self.status = code, message, data, status

    def to_error(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.data is not None:
            error["data"] = self.data
        return error


def from_error(error: Any) -> RpcError:
    """Return the error that a peer sent, whatever its error object is."""
    if not isinstance(error, dict):
        return RpcError(INTERNAL_ERROR, "The server failed without saying how")
    code, message = error.get("code"), error.get("message")
    return RpcError(
        code if isinstance(code, int) else INTERNAL_ERROR,
        str(message)[:MAX_ERROR_TEXT],
        error.get("data"),
    )


def decode(body: bytes, max_values: int = MAX_SERVER_VALUES) -> Message:
    """Decode a single JSON-RPC message; definitions with a key twice are marked as refused. Raises:
    RpcError."""
    if slow := slow_number(body):
        raise RpcError(PARSE_ERROR, f"Parse error: {slow.reason}")
    if has_more_values(body, max_values) is not None:
        text = f"Parse error: more than {max_values} values in arrays and objects"
        raise RpcError(PARSE_ERROR, text, {"reason": TOO_MANY_VALUES, "limit": max_values})
    try:
        found = without_repeats(body, msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyRepeated):
        raise RpcError(PARSE_ERROR, "Parse error") from None
    return check(found)


def unread_reason(error: RpcError) -> str:
    """Return in one word why `decode` refused a message."""
    reason: str = error.data["reason"] if error.data else "no_json_rpc"
    return reason


def check(found: Any) -> Message:
    """Return `found` if it is a request, a notification or a response. Raises: RpcError."""
    if not isinstance(found, dict) or found.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, "Invalid Request: one JSON-RPC 2.0 object is wanted")
    id_, method = found.get("id"), found.get("method")
    if "method" in found:
        if not isinstance(method, str) or len(method) > MAX_METHOD_LENGTH:
            raise RpcError(INVALID_REQUEST, "Invalid Request: method")
        if not isinstance(found.get("params", {}), dict):
            raise RpcError(INVALID_REQUEST, "Invalid Request: params must be an object")
    elif "result" not in found and "error" not in found:
        raise RpcError(INVALID_REQUEST, "Invalid Request: neither a method nor an answer")
    if "id" in found and not is_id(id_) and not ("error" in found and id_ is None):
        raise RpcError(INVALID_REQUEST, "Invalid Request: id must be a string or an integer")
    return found


def is_id(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_ID_LENGTH
    return isinstance(value, int) and not isinstance(value, bool)


def is_request(message: Message) -> bool:
    return "method" in message and "id" in message


def is_notification(message: Message) -> bool:
    return "method" in message and "id" not in message


def is_response(message: Message) -> bool:
    return "method" not in message


def params_of(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = message.get("params") or {}
    return found


def meta_of(params: dict[str, Any]) -> dict[str, Any]:
    found = params.get("_meta")
    return found if isinstance(found, dict) else {}


def request(id_: RequestId, method: str, params: dict[str, Any] | None = None) -> Message:
    message: Message = {"jsonrpc": "2.0", "id": id_, "method": method}
    return message if params is None else {**message, "params": params}


def notification(method: str, params: dict[str, Any] | None = None) -> Message:
    message: Message = {"jsonrpc": "2.0", "method": method}
    return message if params is None else {**message, "params": params}


def result(id_: RequestId | None, value: Any) -> Message:
    return {"jsonrpc": "2.0", "id": id_, "result": value}


def failure(id_: RequestId | None, error: RpcError) -> Message:
    return {"jsonrpc": "2.0", "id": id_, "error": error.to_error()}


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)
