"""Seals the `requestState` that a client of 2026-07-28 gets and brings back, so that it neither
reads nor changes it, and it is good only for who got it, for that very request, and for a while.

Pure but for random nonces. The principal and the digest of the request are what the seal is bound
to: with another of either it does not open.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError

TTL_S = 600.0
"""How long somebody may take to answer."""
MAX_STATE_LENGTH = 64 * 1024
PREFIX = "v1."
NONCE_BYTES = 12
NOT_OF_THE_REQUEST = frozenset({"inputResponses", "requestState", "_meta"})
"""Parameters that are others when the same request comes again."""


MAX_ROUNDS = 16
"""How often one call may ask its client something."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either what the server behind us wants back, or where the call waits."""

    server: str
    expires_at: float
    state: str | None = None
    """The server's own `requestState`; None: it gave none."""
    worker: str | None = None
    call: str | None = None
    """A call that is open at a server of the older era, held by that worker."""
    asked: tuple[str, ...] = ()
    """The keys of what the client is to answer."""
    rounds: int = 0
    """How often it was asked, this time too."""


def request_digest(endpoint: str, method: str, params: dict[str, Any]) -> bytes:
    """Return a digest of all that must be the same when a request comes again with answers."""
    kept = {name: value for name, value in params.items() if name not in NOT_OF_THE_REQUEST}
    said = msgspec.json.encode([endpoint, method, kept], order="sorted")
    return hashlib.sha256(said).digest()


class Sealer:
    """Seals and opens continuations.

    `keys`: of 32 bytes each; the first seals, all open, so that a secret can be rotated.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        assert keys
        self._keys = [AESGCM(key) for key in keys]

    def seal(self, continuation: Continuation, principal: str, digest: bytes) -> str:
        """Raises: RpcError, where the server's own state is too long for ours to come back."""
        nonce = os.urandom(NONCE_BYTES)
        plain = msgspec.json.encode(continuation)
        sealed = self._keys[0].encrypt(nonce, plain, bound_to(principal, digest))
        state = PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode().rstrip("=")
        if len(state) > MAX_STATE_LENGTH:
            data = {"server": continuation.server, "reason": "state_too_long"}
            raise RpcError(INTERNAL_ERROR, "requestState: the server's own is too long", data)
        return state

    def unseal(self, state: Any, principal: str, digest: bytes, now: float) -> Continuation:
        """Raises: RpcError, the same for all that can be wrong."""
        raw = decode_state(state)
        for key in self._keys:
            try:
                plain = key.decrypt(
                    raw[:NONCE_BYTES], raw[NONCE_BYTES:], bound_to(principal, digest)
                )
            except InvalidTag:
                continue
            found = msgspec.json.decode(plain, type=Continuation)
            if found.expires_at < now:
                break
            return found
        raise refused()


def decode_state(state: Any) -> bytes:
    """Strictly: one state has one spelling."""
    if not isinstance(state, str) or len(state) > MAX_STATE_LENGTH or not state.startswith(PREFIX):
        raise refused()
    text = state.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise refused() from None
    if len(raw) <= NONCE_BYTES or base64.urlsafe_b64encode(raw).decode().rstrip("=") != text:
        raise refused()
    return raw


def bound_to(principal: str, digest: bytes) -> bytes:
    return b"mcp request state 1\n" + digest + principal.encode()


def refused() -> RpcError:
    return RpcError(
        INVALID_PARAMS,
        "requestState: invalid, expired, or of another request",
        {"reason": "invalid_request_state"},
    )
