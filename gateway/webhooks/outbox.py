"""Turns what has happened into deliveries: each alert, each state that an invoice or a top-up
entered, each batch that ended and each call that waits for a person, once, to each endpoint that
asked and, by e-mail, to each person whose role it is for. A row is marked in the transaction that
writes its deliveries, under its lock: no crash loses it, and two gateways at once take different
ones. Operators hear of an org's top-ups, too: they take its payment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts import alerts
from billing.credits import top_ups
from billing.invoices import outbox as transitions
from gateway.batches import batches
from gateway.mcp import approvals
from gateway.tenancy.tables import orgs
from gateway.webhooks import mail_channel, queue
from gateway.webhooks.deliveries import QUEUE
from gateway.webhooks.queue import DeliveryQueue, add_deliveries, to_row
from gateway.webhooks.tables import endpoints
from gateway.wire.admin.webhook_events import (
    WebhookEvent,
    approval_event,
    batch_event,
    invoice_event,
    to_event,
    top_up_event,
)
from gateway.wire.shared.batch import ENDED

BATCH = 100
WORK = "deliveries"
"""The topic of the triggers on all that is told of, and on deliveries."""


def next_due(*, mails: bool) -> str:
    """Return SQL: the moment at which there is something to dispatch or deliver next, or NULL."""
    untold = " OR ".join(
        f"EXISTS (SELECT FROM {each})"
        for each in (
            "alerts WHERE dispatched_at IS NULL",
            "invoice_transitions WHERE dispatched_at IS NULL",
            "top_ups WHERE told IS DISTINCT FROM state",
            f"batches WHERE dispatched_at IS NULL AND status IN {(*sorted(ENDED),)}",
            "mcp_approvals WHERE dispatched_at IS NULL",
        )
    )
    queues: list[DeliveryQueue[Any]] = [QUEUE, mail_channel.QUEUE] if mails else [QUEUE]
    due = ", ".join(f"({queue.next_due(each)})" for each in queues)
    return f"SELECT least((SELECT now() WHERE {untold}), {due})"


class Occurrence(msgspec.Struct, frozen=True):
    org_id: str
    id: str
    """The id of the event. It has no dot: that ends an id in what is signed."""
    event: WebhookEvent
    is_for_operators: bool = False
    """True if operators get the event, beside the org that it is about."""


async def fan_out(db: AsyncEngine, *, mails: bool = False) -> int:
    """Dispatch the oldest of each kind; return how many. `db`: of a role that sees every org's
    rows. mails: people are told by e-mail, too."""
    async with db.begin() as conn:
        raised = await alerts.undispatched(conn, BATCH)
        entered = await transitions.undispatched(conn, BATCH)
        asked = await top_ups.undispatched(conn, BATCH)
        ended = await batches.undispatched(conn, BATCH)
        waiting = await approvals.undispatched(conn, BATCH)
        found = [Occurrence(each.org_id, each.id, to_event(each)) for each in raised]
        found += [
            Occurrence(each.org_id, f"{each.invoice_id}_{each.state}", invoice_event(each))
            for each in entered
        ]
        found += [
            Occurrence(each.org_id, f"{each.id}_{each.state}", top_up_event(each), True)
            for each in asked
        ]
        found += [Occurrence(each.org_id, each.id, batch_event(each)) for each in ended]
        found += [Occurrence(each.call.org_id, each.id, approval_event(each)) for each in waiting]
        if not found:
            return 0
        await _deliver(conn, found)
        if mails:
            await _mail(conn, found)
        await alerts.mark_dispatched(conn, [each.id for each in raised])
        await transitions.mark_dispatched(conn, [each.id for each in entered])
        await top_ups.mark_dispatched(conn, [each.id for each in asked])
        await batches.mark_dispatched(conn, [each.id for each in ended])
        await approvals.mark_dispatched(conn, [each.id for each in waiting])
    return len(found)


async def _deliver(conn: AsyncConnection, found: Sequence[Occurrence]) -> None:
    columns = (endpoints.c.org_id, endpoints.c.id, endpoints.c.event_types, orgs.c.is_operator)
    about = endpoints.c.org_id.in_({each.org_id for each in found})
    operators = orgs.c.is_operator & sa.literal(any(each.is_for_operators for each in found))
    listening = sa.select(*columns).join(orgs, orgs.c.id == endpoints.c.org_id)
    listening = listening.where(
        sa.or_(about, operators),
        endpoints.c.archived_at.is_(None),
        endpoints.c.disabled_at.is_(None),
    )
    asked = list(await conn.execute(listening))
    rows = [
        to_row(QUEUE, endpoint.org_id, endpoint.id, each.id, each.event)
        for each in found
        for endpoint in asked
        if each.event.type in endpoint.event_types
        and (endpoint.org_id == each.org_id or (each.is_for_operators and endpoint.is_operator))
    ]
    await add_deliveries(conn, QUEUE, rows)


async def _mail(conn: AsyncConnection, found: Sequence[Occurrence]) -> None:
    people = await mail_channel.find_people(
        conn,
        (each.org_id for each in found),
        operators=any(each.is_for_operators for each in found),
    )
    org_of = {each.id: each.org_id for each in people}
    rows = [
        to_row(mail_channel.QUEUE, org_of[user_id], user_id, each.id, each.event)
        for each in found
        for user_id in mail_channel.recipients(each.event, each.org_id, people)
    ]
    await add_deliveries(conn, mail_channel.QUEUE, rows)
