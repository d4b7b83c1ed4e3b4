"""The parts that every transport over HTTP shares: a server with its pool, and a refusal."""

from __future__ import annotations

import msgspec

from mcp_bridge.upstream.credentials import CredentialSet, CredentialSource, Refusal
from mcp_bridge.upstream.http1 import Headers, Pool
from mcp_bridge.upstream.upstream import (
    ServerConfig,
)

FRAMING = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
)


class HttpTarget(msgspec.Struct, frozen=True):
    """A server that is asked over HTTP. `pool`: of one transport alone, which closes it."""

    config: ServerConfig
    pool: Pool
    shown: CredentialSource


def refusal_of(status: int, headers: Headers, credential: CredentialSet) -> Refusal | None:
    """Return the refusal that an answer is; None: whatever the answer is, another credential would
    not change it."""
    if status not in (401, 403):
        return None
    said = [
        value.decode("latin-1") for name, value in headers if name.lower() == b"www-authenticate"
    ]
    challenge = ", ".join(said)
    if status == 401 or "insufficient_scope" in challenge:
        return Refusal(credential, status, challenge)
    return None
