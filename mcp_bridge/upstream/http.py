"""The parts that every transport over HTTP shares: a server with its pool, headers, timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mcp_bridge.upstream.credentials import CredentialSet, CredentialSource, Refusal
from mcp_bridge.upstream.http1 import Headers, Pool
from mcp_bridge.upstream.upstream import (
    CONNECT_TIMEOUT_S,
    POOL_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    ServerConfig,
)

FRAMING = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
)
"""Headers that frame a message, which no credential may set."""


class HttpTarget(msgspec.Struct, frozen=True):
    """A server that is reached over HTTP. `pool`: for one transport, which closes it."""

    config: ServerConfig
    pool: Pool
    credentials: CredentialSource


def own_headers(config: ServerConfig) -> dict[str, str]:
    """Return the headers of every request to a server, its configured ones among them."""
    return {
        "host": urlsplit(config.url).netloc.rpartition("@")[2],
        "accept-encoding": "identity",
        "user-agent": "tollgate",
        **config.headers,
    }


def with_credential(
    headers: Mapping[str, str], credential: CredentialSet
) -> list[tuple[bytes, bytes]]:
    """Return encoded headers with those of a credential, which replace others but framing."""
    own = {name.lower(): value for name, value in credential.values.items()}
    merged = {**headers, **{name: own[name] for name in own if name not in FRAMING}}
    return [(name.encode(), value.encode()) for name, value in merged.items()]


def timeouts(read_s: float | None) -> dict[str, Any]:
    """Return the timeouts of a request. `read_s`: between two pieces of its answer."""
    bounds = {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": WRITE_TIMEOUT_S}
    return {**bounds, "pool": POOL_TIMEOUT_S}


def refusal_of(status: int, headers: Headers, credential: CredentialSet) -> Refusal | None:
    """Return the refusal of a credential; None: another credential would change nothing."""
    if status not in (401, 403):
        return None
    challenge = ", ".join(
        value.decode("latin-1") for name, value in headers if name.lower() == b"www-authenticate"
    )
    if status == 401 or "insufficient_scope" in challenge:
        return Refusal(credential, status, challenge)
    return None
