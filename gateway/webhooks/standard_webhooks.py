"""Signs webhooks as Standard Webhooks 1.0.0 has it: secrets, and the three headers of a message.
Pure. The symmetric scheme: HMAC-SHA256 over `id.timestamp.body`, base64, marked v1; a message is
signed with each secret that is good at that moment, so that one can be replaced without a message
that its receiver cannot verify."""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
"""The specification wants 24 at least."""


def new_secret() -> str:
    drawn = secrets.token_bytes(SECRET_BYTES)
    return SECRET_PREFIX + base64.b64encode(drawn).decode()


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    assert "." not in message_id, "it could be read as another id and another moment"
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def headers(
    good_secrets: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the signature headers. `timestamp`: Unix seconds of this attempt; `message_id` is the
    same over all of them."""
    signatures = [sign(each, message_id, timestamp, body) for each in good_secrets]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }
