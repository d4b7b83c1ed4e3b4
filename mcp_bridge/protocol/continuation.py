"""Seals the `requestState` that a client of 2026-07-28 gets and sends back.

The client can neither read nor change it, and it is valid for one principal, one request and a
limited time: principal and digest of the request are the associated data of the encryption. Pure
but for random nonces.
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
"""How long a client may take to answer."""
MAX_STATE_LENGTH = 64 * 1024
PREFIX = "v1."
NONCE_BYTES = 12
CHANGING_PARAMS = frozenset({"inputResponses", "requestState", "_meta"})
"""Parameters that may change when the same request comes again."""
MAX_ROUNDS = 16
"""How often one call may ask its client something."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Either the state that the server wants back, or the place where an open call waits."""

    server: str
    expires_at: float
    state: str | None = None
    """The server's own `requestState`, if it sent one."""
    worker: str | None = None
    call: str | None = None
    """The id of a call that `worker` holds open at a server of the older era."""
    asked: tuple[str, ...] = ()
    """The keys of the requests that the client is to answer."""
    rounds: int = 0
    """How often the client was asked, including this time."""


def request_digest(endpoint: str, method: str, params: dict[str, Any]) -> bytes:
    """Return a digest of everything that must stay the same when a request comes again."""
    fixed = {name: value for name, value in params.items() if name not in CHANGING_PARAMS}
    encoded = msgspec.json.encode([endpoint, method, fixed], order="sorted")
    return hashlib.sha256(encoded).digest()


class Sealer:
    """Seals and opens continuations.

    `keys`: 32 bytes each; the first one seals and all open, so that a secret can be rotated.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        assert keys
        self._keys = [AESGCM(key) for key in keys]

    def seal(self, continuation: Continuation, principal: str, digest: bytes) -> str:
        """Raises: RpcError, if the server's state makes ours longer than we accept back."""
        nonce = os.urandom(NONCE_BYTES)
        plain = msgspec.json.encode(continuation)
        sealed = self._keys[0].encrypt(nonce, plain, associated_data(principal, digest))
        state = PREFIX + base64.urlsafe_b64encode(nonce + sealed).decode().rstrip("=")
        if len(state) > MAX_STATE_LENGTH:
            data = {"server": continuation.server, "reason": "state_too_long"}
            raise RpcError(INTERNAL_ERROR, "requestState: the server's own is too long", data)
        return state

    def unseal(self, state: Any, principal: str, digest: bytes, now: float) -> Continuation:
        """Raises: RpcError, the same for every defect."""
        raw = decode_state(state)
        for key in self._keys:
            try:
                plain = key.decrypt(
                    raw[:NONCE_BYTES], raw[NONCE_BYTES:], associated_data(principal, digest)
                )
            except InvalidTag:
                continue
            found = msgspec.json.decode(plain, type=Continuation)
            if found.expires_at < now:
                break
            return found
        raise invalid_state()


def decode_state(state: Any) -> bytes:
    """Decode a state strictly: each has one spelling. Raises: RpcError."""
    if not isinstance(state, str) or len(state) > MAX_STATE_LENGTH or not state.startswith(PREFIX):
        raise invalid_state()
    text = state.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise invalid_state() from None
    if len(raw) <= NONCE_BYTES or base64.urlsafe_b64encode(raw).decode().rstrip("=") != text:
        raise invalid_state()
    return raw


def associated_data(principal: str, digest: bytes) -> bytes:
    return b"mcp request state 1\n" + digest + principal.encode()


def invalid_state() -> RpcError:
    return RpcError(
        INVALID_PARAMS,
        "requestState: invalid, expired, or of another request",
        {"reason": "invalid_request_state"},
    )
