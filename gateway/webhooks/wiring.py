"""Opens webhooks for one process; what is opened is pushed on the caller's stack."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.net.egress import Egress
from gateway.secret import Cipher, Secret
from gateway.telemetry import Telemetry
from gateway.webhooks.endpoints import CIPHER_PURPOSE
from gateway.webhooks.sender import MAX_CONCURRENT, TIMEOUT_S, WAIT_S, Sender


class Webhooks(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook services that routes need."""

    secrets: Cipher
    """Of endpoints."""
    allow_loopback: bool


def open_webhooks(
    stack: AsyncExitStack,
    secret: Secret,
    system_db: AsyncEngine,
    telemetry: Telemetry,
    *,
    allow_loopback: bool,
) -> Webhooks:
    """Open webhooks. allow_loopback: for development, send to receivers on this machine."""
    secrets = Cipher(secret, CIPHER_PURPOSE)
    egress = Egress(
        allow_loopback=allow_loopback,
        per_host=MAX_CONCURRENT,
        timeout_s=TIMEOUT_S,
        wait_s=WAIT_S,
    )
    stack.callback(egress.close)
    sender = Sender(
        system_db,
        secrets,
        egress,
        on_outcome=lambda outcome: telemetry.webhook_attempts.labels(outcome).inc(),
    )
    sender.start()
    stack.push_async_callback(sender.close)
    return Webhooks(secrets=secrets, allow_loopback=allow_loopback)
