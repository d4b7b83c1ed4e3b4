"""A request of 2026-07-28 as it must be: its `_meta`, and headers that say what its body does.

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

from mcp_bridge.protocol.eras import CAPABILITIES_META, INFO_META, LEVEL_META, LEVELS
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
"""Of what a client says of itself, as JSON: each session keeps it, and each server is told."""
PARAM_PREFIX = MCP_PARAM_HEADER_PREFIX.lower()
HeaderSchema = dict[str, Any]
"""Of a schema of arguments the properties that travel as headers, and nothing else."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A client's description of itself, sent with each request."""

    version: str
    capabilities: dict[str, Any]
    info: dict[str, Any] | None = None
    level: str | None = None
    """From which on it wants to see the log of this request; None: not at all."""


def check_said(capabilities: Any, info: Any, *, named: tuple[str, str]) -> None:
    """Check what a client says of itself.

    `named`: the fields in which they stood. Raises: RpcError.
    """
    bounds = (MAX_CAPABILITIES_BYTES, MAX_INFO_BYTES)
    for field, said, most in zip(named, (capabilities, info), bounds, strict=True):
        if said is not None and len(msgspec.json.encode(said)) > most:
            raise RpcError(INVALID_PARAMS, f"{field}: more than {most} bytes")


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
    named = f"_meta: {CAPABILITIES_META}", f"_meta: {INFO_META}"
    check_said(found.client_capabilities, found.client_info, named=named)
    return Envelope(
        version=found.protocol_version,
        capabilities=found.client_capabilities,
        info=found.client_info if isinstance(found.client_info, dict) else None,
        level=level,
    )


def check_param_headers(
    schema: Any, arguments: dict[str, Any], headers: Iterable[tuple[str, str]]
) -> None:
    """Check that a call's `Mcp-Param-*` headers say what its arguments are. Raises: RpcError."""
    folded = FoldedHeaders(headers)
    found = validate_mcp_param_headers(schema, arguments, folded)
    if found is not None:
        raise RpcError(found.code, found.message, found.data)


class FoldedHeaders(Mapping[str, str]):
    """Headers with those that came twice, which a dict would hide."""

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


def misnames_headers(schema: Any) -> bool:
    """True if this schema of a tool's arguments wants headers that there cannot be: clients leave
    such a tool out. Most name none, which is seen faster than their schema is walked."""
    return names_headers(schema) and find_invalid_x_mcp_header(schema) is not None


def names_headers(listed: Any) -> bool:
    """True if headers are named anywhere in it."""
    return X_MCP_HEADER_KEY.encode() in msgspec.json.encode(listed)


def header_schema(schema: Any) -> HeaderSchema:
    """Return what `check_param_headers` and `param_headers` read of a schema: nothing, if it wants
    headers that there cannot be. In its order, by which the first of several faults is told."""
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
    """Return the headers that we send with a call of a tool with this schema."""
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    return mcp_param_headers(x_mcp_header_map(schema), arguments)


def encode_name(method: str, params: dict[str, Any]) -> str | None:
    """The value of `Mcp-Name`; None: this method has none."""
    key = NAME_BEARING_METHODS.get(method)
    return None if key is None else encode_header_value(str(params.get(key)))
