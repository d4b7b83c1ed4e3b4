"""Sends webhooks: one task in each gateway leases deliveries, signs and sends them, and records the
outcome. An endpoint has one attempt at a time in a process, so one that hangs holds up only its
own; of one org's endpoints a bounded number. Success is 2xx; of an answer only status and headers
are read, and no redirect is followed. 410 disables the endpoint."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import msgspec
from cryptography.exceptions import InvalidTag
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts import alerts, unusual_spend
from foundation.periodic import Periodic
from foundation.tasks import end_tasks
from gateway.db import DATABASE_ERRORS
from gateway.ids import uuid7
from gateway.mcp import call_arguments as asked_arguments
from gateway.net.egress import Egress, EgressError
from gateway.secret import Cipher, Secret, UnknownSecret
from gateway.telemetry import Telemetry
from gateway.webhooks import deliveries
from gateway.webhooks.deliveries import (
    DEAD,
    LEASE_S,
    AttemptOutcome,
    LeasedDelivery,
    delay_s,
    end_attempt,
    lease,
)
from gateway.webhooks.endpoints import CIPHER_PURPOSE
from gateway.webhooks.outbox import fan_out
from gateway.webhooks.standard_webhooks import headers

log = logging.getLogger(__name__)
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""

POLL_S = 1.0
"""An event is late by as much."""
SWEEP_INTERVAL_S = 600.0
MAX_CONCURRENT = 16
MAX_PER_ORG = 4
TIMEOUT_S = 15.0
"""Bounds one attempt: name resolution, connection, request and the head of the answer."""
WAIT_S = 5.0
GONE = 410
REDIRECTS = range(300, 400)

OnOutcome = Callable[[str], None]
"""`delivered`, `failed` (it is tried again) or `dead`."""


class Sender:
    """The sender of one process. `db`: of a role that sees every org's rows. `wall_clock`: Unix
    seconds. `draw`: a number between two, for the spread of attempts."""

    def __init__(
        self,
        db: AsyncEngine,
        cipher: Cipher,
        egress: Egress,
        *,
        on_outcome: OnOutcome = lambda outcome: None,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        wall_clock: Callable[[], float] = time.time,
        draw: Callable[[float, float], float] = JITTER.uniform,
    ) -> None:
        self._db, self._cipher, self._egress = db, cipher, egress
        self._on_outcome = on_outcome
        self._lease_s = lease_s
        self._wall_clock, self._draw = wall_clock, draw
        self._id = uuid7().hex
        self._sending: dict[asyncio.Task[None], LeasedDelivery] = {}
        self._polling = Periodic(
            "webhooks",
            poll_s,
            self.poll,
            log=log,
            failure="webhooks wait for Postgres",
            expected=DATABASE_ERRORS,
        )
        self._swept_at = time.monotonic()

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        """Give up what is under way; its lease ends by itself, and somebody tries again."""
        await self._polling.close()
        for task in list(self._sending):
            await end_tasks(task)

    async def poll(self) -> None:
        """Dispatch what happened, begin what is due. Raises: DATABASE_ERRORS."""
        while await fan_out(self._db):
            continue
        room = MAX_CONCURRENT - len(self._sending)
        if room > 0:
            found = await lease(
                self._db,
                self._id,
                limit=room,
                per_org=MAX_PER_ORG,
                under_way=list(self._sending.values()),
                lease_s=self._lease_s,
            )
            for each in found:
                self._begin(each)
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            for _ in range(await deliveries.sweep(self._db)):
                self._on_outcome(DEAD)
            await alerts.sweep(self._db)
            await asked_arguments.forget_late(self._db, self._wall_clock())
            await unusual_spend.watch(self._db, datetime.fromtimestamp(self._wall_clock(), UTC))

    async def drain(self) -> None:
        """Wait until what is under way has ended."""
        while self._sending:
            await asyncio.wait(list(self._sending))

    def _begin(self, delivery: LeasedDelivery) -> None:
        task = asyncio.create_task(self._send(delivery), name=f"webhook {delivery.id}")
        self._sending[task] = delivery
        task.add_done_callback(self._sending.pop)

    async def _send(self, delivery: LeasedDelivery) -> None:
        attempted = await self.attempt(delivery)
        try:
            state = await end_attempt(self._db, self._id, delivery, attempted)
        except DATABASE_ERRORS as error:
            # The lease ends, and it is sent once more.
            log.warning("delivery %s not written down (%s)", delivery.id, type(error).__name__)
            return
        if state is not None:
            self._on_outcome("failed" if state == deliveries.PENDING else state)
        if state == DEAD:
            log.warning("delivery %s to %s given up", delivery.id, delivery.endpoint_id)

    async def attempt(self, delivery: LeasedDelivery) -> AttemptOutcome:
        try:
            secrets = self._open(delivery)
        except (UnknownSecret, InvalidTag) as error:
            log.error("the secret of %s does not open: %r", delivery.endpoint_id, error)
            return self._failed(delivery, None, "its secret cannot be read")
        body = delivery.body.encode()
        signed = headers(secrets, delivery.event_id, int(self._wall_clock()), body)
        try:
            answer = await self._egress.post_json(delivery.url, body, headers=signed)
        except EgressError as error:
            return self._failed(delivery, None, type(error).__name__)
        if 200 <= answer.status < 300:
            return AttemptOutcome(status=answer.status, failure=None)
        if answer.status == GONE:
            return AttemptOutcome(status=GONE, failure="the receiver wants no more", gone=True)
        why = "a redirect is not followed" if answer.status in REDIRECTS else "refused"
        return self._failed(delivery, answer.status, why, answer.headers.get("retry-after"))

    def _failed(
        self, delivery: LeasedDelivery, status: int | None, why: str, retry_after: str | None = None
    ) -> AttemptOutcome:
        retry_in_s = delay_s(delivery.attempts, retry_after, self._draw)
        return AttemptOutcome(status=status, failure=why, retry_in_s=retry_in_s)

    def _open(self, delivery: LeasedDelivery) -> list[str]:
        """Return the secrets that are good, the current one first."""
        sealed = [(delivery.secret_sealed, delivery.secret_id)]
        if delivery.older_secret_sealed is not None and delivery.older_secret_id is not None:
            sealed.append((delivery.older_secret_sealed, delivery.older_secret_id))
        context = delivery.endpoint_id.encode()
        return [self._cipher.open(data, context, key_id).decode() for data, key_id in sealed]


class Webhooks(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook services that routes need."""

    secrets: Cipher
    """The cipher of the endpoints' signing secrets."""
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
