"""Sends what happened: one task in each gateway leases deliveries, of webhooks and of e-mails,
tries them and records the outcome. A receiver has one attempt at a time in a process, so one that
hangs holds up only its own; of one org's receivers a bounded number.

Of webhooks success is 2xx; of an answer only status and headers are read, and no redirect is
followed. 410 disables the endpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Protocol

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
from gateway.net.mail import Mailer, MailServer
from gateway.secret import Cipher, Secret, UnknownSecret
from gateway.telemetry.metrics import Telemetry
from gateway.webhooks import deliveries, mail_channel
from gateway.webhooks.deliveries import LeasedDelivery
from gateway.webhooks.endpoints import CIPHER_PURPOSE
from gateway.webhooks.mail_channel import ChoiceLinks, MailChannel
from gateway.webhooks.outbox import WORK, fan_out, next_due
from gateway.webhooks.queue import (
    DEAD,
    JITTER,
    LEASE_S,
    PENDING,
    AttemptOutcome,
    DeliveryQueue,
    Draw,
    LeasedRow,
    delay_s,
    end_attempt,
    lease,
    sweep,
)
from gateway.webhooks.standard_webhooks import headers
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Between two polls while there is something to do; an event is late by as much where nobody hears
of it."""
APART_S = 0.1
"""Between two polls at least, however much is heard of."""
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


class Channel(Protocol):
    """A way to deliver."""

    @property
    def queue(self) -> DeliveryQueue[Any]: ...
    @property
    def on_outcome(self) -> OnOutcome: ...

    async def attempt(self, delivery: Any) -> AttemptOutcome:
        """Try a delivery of the queue once."""
        ...


class Sender:
    """The sender of one process. `db`: of a role that sees every org's rows. `sends_mail`: people
    are told of events, so one of `channels` is of e-mails. `rest_s`: how long to rest where there
    is nothing to do, given how long otherwise. `wall_clock`: Unix seconds."""

    def __init__(
        self,
        db: AsyncEngine,
        channels: Sequence[Channel],
        *,
        sends_mail: bool = False,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        rest_s: Callable[[float], float] = lambda poll_s: poll_s,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db, self._channels, self._sends_mail = db, channels, sends_mail
        self._lease_s, self._poll_s, self._rest_s = lease_s, poll_s, rest_s
        self._has_found = False
        """The last poll found something, so there may be more."""
        self._wall_clock = wall_clock
        self._id = uuid7().hex
        self._sending: dict[str, dict[asyncio.Task[None], LeasedRow]] = {
            each.queue.name: {} for each in channels
        }
        self._polling = Periodic(
            "deliveries",
            self._pause_s,
            self.poll,
            log=log,
            failure="deliveries wait for Postgres",
            expected=DATABASE_ERRORS,
            apart_s=APART_S,
        )
        self._swept_at = time.monotonic()

    def start(self) -> None:
        self._polling.start()

    def wake(self) -> None:
        """Poll now: there may be something to do."""
        self._polling.wake()

    def _pause_s(self) -> float:
        if self._has_found or self._under_way():
            return self._poll_s
        sweep_in_s = self._swept_at + SWEEP_INTERVAL_S - time.monotonic()
        return min(self._rest_s(self._poll_s), max(POLL_S, sweep_in_s))

    async def close(self) -> None:
        """Give up what is under way; its lease ends by itself, and somebody tries again."""
        await self._polling.close()
        for task in self._under_way():
            await end_tasks(task)

    async def poll(self) -> None:
        """Dispatch what happened, begin what is due. Raises: DATABASE_ERRORS."""
        self._has_found = False
        while await fan_out(self._db, mails=self._sends_mail):
            self._has_found = True
        for channel in self._channels:
            await self._begin_due(channel)
        if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            for channel in self._channels:
                for _ in range(await sweep(self._db, channel.queue)):
                    channel.on_outcome(DEAD)
            await alerts.sweep(self._db)
            await asked_arguments.forget_late(self._db, self._wall_clock())
            await unusual_spend.watch(self._db, datetime.fromtimestamp(self._wall_clock(), UTC))

    async def drain(self) -> None:
        """Wait until what is under way has ended."""
        while tasks := self._under_way():
            await asyncio.wait(tasks)

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [task for sending in self._sending.values() for task in sending]

    async def _begin_due(self, channel: Channel) -> None:
        sending = self._sending[channel.queue.name]
        room = MAX_CONCURRENT - len(sending)
        if room <= 0:
            return
        found = await lease(
            self._db,
            channel.queue,
            self._id,
            limit=room,
            per_org=MAX_PER_ORG,
            under_way=list(sending.values()),
            lease_s=self._lease_s,
        )
        self._has_found |= bool(found)
        for each in found:
            task = asyncio.create_task(self._send(channel, each), name=f"delivery {each.id}")
            sending[task] = each
            task.add_done_callback(sending.pop)

    async def _send(self, channel: Channel, delivery: LeasedRow) -> None:
        try:
            attempted = await channel.attempt(delivery)
            state = await end_attempt(self._db, channel.queue, self._id, delivery, attempted)
        # The lease ends, and it is sent once more.
        except DATABASE_ERRORS as error:
            log.warning("delivery %s not written down (%s)", delivery.id, type(error).__name__)
            return
        except Exception:
            log.exception("delivery %s is tried again", delivery.id)
            return
        if state is not None:
            channel.on_outcome("failed" if state == PENDING else state)
        if state == DEAD:
            log.warning("delivery %s to %s given up", delivery.id, delivery.receiver_id)


class WebhookChannel:
    """Signs events and posts them to endpoints. `wall_clock`: Unix seconds."""

    queue = deliveries.QUEUE

    def __init__(
        self,
        cipher: Cipher,
        egress: Egress,
        *,
        on_outcome: OnOutcome = lambda outcome: None,
        wall_clock: Callable[[], float] = time.time,
        draw: Draw = JITTER.uniform,
    ) -> None:
        self._cipher, self._egress = cipher, egress
        self.on_outcome = on_outcome
        self._wall_clock, self._draw = wall_clock, draw

    async def attempt(self, delivery: LeasedDelivery) -> AttemptOutcome:
        try:
            secrets = self._open(delivery)
        except (UnknownSecret, InvalidTag) as error:
            log.error("the secret of %s does not open: %r", delivery.receiver_id, error)
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
        retry_in_s = delay_s(delivery.attempts, self._draw, retry_after=retry_after)
        return AttemptOutcome(status=status, failure=why, retry_in_s=retry_in_s)

    def _open(self, delivery: LeasedDelivery) -> list[str]:
        """Return the secrets that are good, the current one first."""
        sealed = [(delivery.secret_sealed, delivery.secret_id)]
        if delivery.older_secret_sealed is not None and delivery.older_secret_id is not None:
            sealed.append((delivery.older_secret_sealed, delivery.older_secret_id))
        context = delivery.receiver_id.encode()
        return [self._cipher.open(data, context, key_id).decode() for data, key_id in sealed]


class Webhooks(msgspec.Struct, frozen=True, kw_only=True):
    """The services of deliveries that routes need."""

    secrets: Cipher
    """The cipher of the endpoints' signing secrets."""
    allow_loopback: bool
    choice_links: ChoiceLinks
    """The links in e-mails by which their readers choose what they are sent."""


def open_webhooks(
    stack: AsyncExitStack,
    secret: Secret,
    system_db: AsyncEngine,
    telemetry: Telemetry,
    *,
    allow_loopback: bool,
    mail_server: MailServer | None,
    public_url: str,
    listener: WorkListener,
) -> Webhooks:
    """Open webhooks and e-mails. allow_loopback: for development, send to receivers on this
    machine."""
    secrets = Cipher(secret, CIPHER_PURPOSE)
    links = ChoiceLinks(Cipher(secret, mail_channel.CIPHER_PURPOSE), public_url)
    egress = Egress(
        allow_loopback=allow_loopback,
        per_host=MAX_CONCURRENT,
        timeout_s=TIMEOUT_S,
        wait_s=WAIT_S,
    )
    stack.callback(egress.close)
    channels: list[Channel] = [
        WebhookChannel(
            secrets,
            egress,
            on_outcome=lambda outcome: telemetry.webhook_attempts.labels(outcome).inc(),
        )
    ]
    if mail_server is not None:
        channels.append(
            MailChannel(
                system_db,
                Mailer(mail_server, at_once=MAX_CONCURRENT),
                links,
                on_outcome=lambda outcome: telemetry.mail_attempts.labels(outcome).inc(),
            )
        )
    sends_mail = mail_server is not None
    sender = Sender(system_db, channels, sends_mail=sends_mail, rest_s=listener.rest_s)
    listener.watch(WORK, sender.wake, next_due(mails=sends_mail))
    sender.start()
    stack.push_async_callback(sender.close)
    return Webhooks(secrets=secrets, allow_loopback=allow_loopback, choice_links=links)
