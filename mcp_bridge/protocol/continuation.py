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
MAX_QUESTIONS = 64
"""Questions of one call, and of one server in a session's minute outside of requests."""
CALL_S = 3600.0
"""Bounds one call, its questions and all rounds included."""


class QuestionCount(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts what one call asked of its client. `began_at`: seconds since the epoch."""

    began_at: float
    rounds: int = 0
    questions: int = 0

    @property
    def ends_at(self) -> float:
        return self.began_at + CALL_S

    def after(self, questions: int, server: str) -> QuestionCount:
        """Return the count with one round more. Raises: RpcError, if it is one too many."""
        found = msgspec.structs.replace(
            self, rounds=self.rounds + 1, questions=self.questions + questions
        )
        for name, count, most in (
            ("rounds", found.rounds, MAX_ROUNDS),
            ("questions", found.questions, MAX_QUESTIONS),
        ):
            if count > most:
                data = {"server": server, "reason": f"too_many_{name}", "limit": most}
                raise RpcError(INTERNAL_ERROR, "The server asked too often", data)
        return found

    def answer_by(self, now: float) -> float:
        """Return until when the client may answer. Raises: RpcError, if the call's time is over."""
        if now >= self.ends_at:
            raise took_too_long()
        return min(now + TTL_S, self.ends_at)


def took_too_long() -> RpcError:
    return RpcError(INTERNAL_ERROR, "It took too long", {"reason": "call_time"})


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
    count: QuestionCount | None = None
    """Counts how often the client was asked, including this time."""


def request_digest(endpoint: str, method: str, params: dict[str, Any]) -> bytes:
    """Return a digest of everything that must stay the same when a request comes again: of each
    parameter the bytes, which a person may have approved."""
    fixed = sorted(params.keys() - CHANGING_PARAMS)
    encoded = msgspec.json.encode([endpoint, method, [[name, params[name]] for name in fixed]])
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
