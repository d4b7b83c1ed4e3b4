"""Writes the headers that a request of the newer era has beside its body. Pure."""

from __future__ import annotations

from typing import Any

from mcp_bridge.protocol.eras import METHOD_HEADER, MODERN, NAME_HEADER, VERSION_HEADER
from mcp_bridge.protocol.inbound import encode_name


def modern_headers(method: str, params: dict[str, Any]) -> dict[str, str]:
    headers = {VERSION_HEADER: MODERN, METHOD_HEADER: method}
    name = encode_name(method, params)
    return headers if name is None else {**headers, NAME_HEADER: name}
