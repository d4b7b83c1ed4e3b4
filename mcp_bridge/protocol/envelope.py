"""The envelope of a request of 2026-07-28: its `_meta`, and headers that repeat parts of its body.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from mcp.shared.inbound import (
    MCP_PARAM_HEADER_PREFIX,
    NAME_BEARING_METHODS,
    X_MCP_HEADER_KEY,
    InboundLadderRejection,
    classify_inbound_request,
    encode_header_value,
    find_duplicated_routing_header,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    validate_mcp_param_headers,
    x_mcp_header_map,
)

from mcp_bridge.protocol.eras import (
    CAPABILITIES_META,
    INFO_META,
    LEVEL_META,
    LEVELS,
    METHOD_HEADER,
    MODERN,
    NAME_HEADER,
    VERSION_HEADER,
)
from mcp_bridge.protocol.rpc import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    Message,
    RpcError,
    meta_of,
    params_of,
)

MAX_CAPABILITIES_BYTES = 8 * 1024
MAX_INFO_BYTES = 16 * 1024
"""Bytes of a client's capabilities and info in JSON: sessions store them, each server gets them."""
PARAM_PREFIX = MCP_PARAM_HEADER_PREFIX.lower()
HeaderSchema = dict[str, Any]
"""The part of an argument schema that holds the properties which are sent as headers."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A client's description of itself, sent with each request."""

    version: str
    capabilities: dict[str, Any]
    info: dict[str, Any] | None = None
    level: str | None = None
    """The lowest level of log messages that it wants for this request; None: no log messages."""


def check_client_size(capabilities: Any, info: Any, *, fields: tuple[str, str]) -> None:
    """Check the size of a client's description. `fields`: their names. Raises: RpcError."""
    bounds = (MAX_CAPABILITIES_BYTES, MAX_INFO_BYTES)
    for field, value, max_bytes in zip(fields, (capabilities, info), bounds, strict=True):
        if value is not None and len(msgspec.json.encode(value)) > max_bytes:
            raise RpcError(INVALID_PARAMS, f"{field}: more than {max_bytes} bytes")


def read_envelope(message: Message, headers: list[tuple[str, str]]) -> Envelope:
    """Read the envelope of a request. `headers`: names in lower case. Raises: RpcError."""
    twice = find_duplicated_routing_header(headers)
    if twice is not None:
        raise RpcError(HEADER_MISMATCH, f"{twice} header appears more than once")
    found = classify_inbound_request(message, headers=dict(headers))
    if isinstance(found, InboundLadderRejection):
        raise RpcError(found.code, found.message, found.data)
    level = meta_of(params_of(message)).get(LEVEL_META)
    if not isinstance(found.client_capabilities, dict):
        raise RpcError(INVALID_PARAMS, "_meta: client capabilities must be an object")
    if level is not None and level not in LEVELS:
        raise RpcError(INVALID_PARAMS, f"_meta: {LEVEL_META}: no log level")
    fields = f"_meta: {CAPABILITIES_META}", f"_meta: {INFO_META}"
    check_client_size(found.client_capabilities, found.client_info, fields=fields)
    return Envelope(
        version=found.protocol_version,
        capabilities=found.client_capabilities,
        info=found.client_info if isinstance(found.client_info, dict) else None,
        level=level,
    )


def check_param_headers(
    schema: Any, arguments: dict[str, Any], headers: Iterable[tuple[str, str]]
) -> None:
    """Check that a call's `Mcp-Param-*` headers repeat its arguments. Raises: RpcError."""
    found = validate_mcp_param_headers(schema, arguments, ParamHeaders(headers))
    if found is not None:
        raise RpcError(found.code, found.message, found.data)


class ParamHeaders(Mapping[str, str]):
    """The `Mcp-Param-*` headers, whose `items` keep duplicates, which a dict would hide."""

    def __init__(self, headers: Iterable[tuple[str, str]]) -> None:
        self._headers = [pair for pair in headers if pair[0].startswith(PARAM_PREFIX)]

    def __getitem__(self, name: str) -> str:
        return dict(self._headers)[name]

    def __iter__(self) -> Any:
        return iter(dict(self._headers))

    def __len__(self) -> int:
        return len(self._headers)

    def items(self) -> Any:
        return list(self._headers)


def has_invalid_headers(schema: Any) -> bool:
    """True if an argument schema names headers that cannot exist: clients leave such a tool out."""
    # Most schemas name no headers, and the search is faster than walking them.
    return names_headers(schema) and find_invalid_x_mcp_header(schema) is not None


def names_headers(schema: Any) -> bool:
    """True if headers are named anywhere in one or more schemas."""
    return X_MCP_HEADER_KEY.encode() in msgspec.json.encode(schema)


def header_schema(schema: Any) -> HeaderSchema:
    """Return the part of a schema that `check_param_headers` and `param_headers` read.

    Empty for a schema with invalid headers. The order stays, which decides what fault is reported.
    """
    kept: HeaderSchema = {}
    if not names_headers(schema) or find_invalid_x_mcp_header(schema) is not None:
        return kept
    for path, token in reversed(x_mcp_header_map(schema).items()):  # it walks from the end
        there, here = schema, kept
        for name in path:
            there = there["properties"][name]
            here = here.setdefault("properties", {}).setdefault(name, {})
        here |= {X_MCP_HEADER_KEY: token, "type": there["type"]}
    return kept


def param_headers(schema: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """Return the `Mcp-Param-*` headers for a call of a tool with this schema."""
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    return mcp_param_headers(x_mcp_header_map(schema), arguments)


def modern_headers(method: str, params: dict[str, Any]) -> dict[str, str]:
    """Return the headers that a request of 2026-07-28 has beside its body."""
    headers = {VERSION_HEADER: MODERN, METHOD_HEADER: method}
    if (key := NAME_BEARING_METHODS.get(method)) is not None:
        headers[NAME_HEADER] = encode_header_value(str(params.get(key)))
    return headers
