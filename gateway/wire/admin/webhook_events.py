"""The bodies of webhooks and the alerts of `/v1/admin/alerts`, as structs, and alerts as either.

Quantities are decimal texts beside their unit: no reader's floats round money. Moments are ISO 8601
in an event, as Standard Webhooks has them, and Unix seconds in administration.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec

from billing.alerts.alerts import Alert, Reason, kind_of_measure
from billing.alerts.disputed_usage import DisputeRecord
from billing.credits.top_ups import TopUp, TopUpState
from billing.currency import format_coins
from billing.invoices.outbox import StateEntry
from billing.money import Pico, format_usd
from gateway.wire.shared.batch import Batch
from gateway.wire.shared.resource import view_of
from mcp_bridge.caller import Caller
from mcp_bridge.trust.approvals import Approval, Decider

EventType = Literal[
    "budget.threshold_reached",
    "rate_limit.threshold_reached",
    "spend.unusual",
    "usage.disputed",
    "credits.low",
    "credits.exhausted",
    "mcp.approval_requested",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "top_up.requested",
    "top_up.granted",
    "top_up.failed",
    "top_up.expired",
    "invoice.draft",
    "invoice.finalized",
    "invoice.past_due",
    "invoice.reminder_1",
    "invoice.reminder_2",
    "invoice.reminder_3",
    "invoice.suspended",
    "invoice.uncollectible",
    "invoice.paid",
    "invoice.voided",
]
"""The event types that an endpoint can subscribe to."""
PING = "webhook.ping"
"""Sent when somebody asks for it, to any endpoint."""


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    value: str
    unit: str
    """`usd`, or `tokens` (of a rate limit: a minute)."""


class EventScope(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    """org, project, key, client; tag, whose id is `key=value`; model, whose id is the project's, a
    slash and its name (of a budget: its name); key_model, the same of a key."""
    id: str


class EventPeriod(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    """day, month or total of a budget, in UTC; hour of a rate limit; day of unusual spend and of
    disputed usage."""
    start: datetime | None
    """Null of `total`."""


class ThresholdReached(msgspec.Struct, frozen=True, kw_only=True):
    alert_id: str
    organization_id: str
    scope: EventScope
    measure: str
    """`spend`, `unusual_spend` (of an hour, whose usual most is the limit), `disputed_usage` (used
    is what an upstream claimed of a request, the limit what was billed), or the limit of a plan."""
    cap_id: str | None
    """The id of the scope's cap; null for a rate limit."""
    period: EventPeriod
    threshold_percent: int
    limit: Quantity
    used: Quantity
    reason: Reason | None
    """`spent`: so much of the cap is; `refused`: a hard cap has refused a request that might have
    cost more than is left of it. Null of a rate limit."""


class BalanceCrossed(msgspec.Struct, frozen=True, kw_only=True):
    """A prepaid balance has fallen to a threshold; it is said again once a credit has lifted it
    above."""

    alert_id: str
    organization_id: str
    threshold: Quantity
    left: Quantity
    """Less than nothing where more was spent than paid for."""
    reason: Reason
    """`refused`: less is left than a request might have cost, which was refused."""


class BatchEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that has ended: OpenAI's fields, and whose it is."""

    id: str
    organization_id: str
    project_id: str


class ApprovalRequested(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an MCP server that waits for a person, who answers it by its id."""

    organization_id: str
    project_id: str
    approval_id: str
    server: str
    tool: str
    client_id: str
    """The key or OAuth client that asks."""
    decider: Decider
    """`caller`: the rules leave the answer to it."""
    arguments_digest: str
    """The digest of the arguments: only this call is approved, and its arguments are not stored."""
    expires_at: datetime


class TopUpEntered(msgspec.Struct, frozen=True, kw_only=True):
    """A top-up's change of state. `requested`: who takes payments for the installation grants it,
    or says that it failed; both by `top_up_id`, any number of times."""

    organization_id: str
    top_up_id: str
    state: TopUpState
    amount: Quantity
    left: Quantity
    """When it was requested."""
    requested_at: datetime
    expires_at: datetime
    credit_id: str | None
    failure: str | None


class InvoiceEntered(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an invoice that hold for good; what is left to pay, its resource says."""

    organization_id: str
    invoice_id: str
    number: str | None
    """Null of a draft."""
    state: str
    currency: str
    total: str | None
    """In its currency; null of a draft without a rate."""
    due_at: datetime | None


class EndpointPing(msgspec.Struct, frozen=True, kw_only=True):
    organization_id: str
    endpoint_id: str


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    timestamp: datetime
    data: (
        ThresholdReached
        | BalanceCrossed
        | BatchEnded
        | ApprovalRequested
        | TopUpEntered
        | EndpointPing
        | InvoiceEntered
    )


class AlertView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "alert"
    id: str
    type: str
    """The type of the event that reports it."""
    scope: EventScope
    measure: str
    cap_id: str | None
    period: str
    period_start: int | None
    threshold_percent: int
    limit: Quantity
    used: Quantity
    """The quantity used; for `credits_low` and `credits_exhausted`, the quantity left."""
    reason: Reason | None
    """`spent`, or `refused` by a hard cap or an empty balance; null of a rate limit."""
    occurred_at: int


class DisputedUsageView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "disputed_usage"
    id: str
    """The id of the attempt."""
    request_id: str
    model: str
    upstream: str
    """The model's name, and the position of its replica in the settings."""
    billed_tokens: int
    input_tokens: int
    """Claimed by the upstream beyond what was billed, as are `output_tokens`."""
    output_tokens: int
    admitted_at: int


def to_disputed_view(found: DisputeRecord) -> DisputedUsageView:
    return view_of(DisputedUsageView, found, id=found.event_id)


def invoice_event(entered: StateEntry) -> WebhookEvent:
    total, currency = entered.total_coins, entered.currency
    return WebhookEvent(
        type=invoice_event_type(entered),
        timestamp=entered.occurred_at,
        data=InvoiceEntered(
            organization_id=entered.org_id,
            invoice_id=entered.invoice_id,
            number=entered.number,
            state=entered.state,
            currency=currency,
            total=None if total is None else format_coins(total, currency),
            due_at=entered.due_at,
        ),
    )


def invoice_event_type(entered: StateEntry) -> str:
    """One of EventType."""
    return f"invoice.{entered.state}"


def top_up_event(top_up: TopUp) -> WebhookEvent:
    return WebhookEvent(
        type=f"top_up.{top_up.state}",
        timestamp=top_up.ended_at or top_up.requested_at,
        data=TopUpEntered(
            organization_id=top_up.org_id,
            top_up_id=top_up.id,
            state=top_up.state,
            amount=usd_quantity(top_up.amount_pico),
            left=usd_quantity(top_up.left_pico),
            requested_at=top_up.requested_at,
            expires_at=top_up.expires_at,
            credit_id=top_up.credit_id,
            failure=top_up.failure,
        ),
    )


def batch_event(batch: Batch) -> WebhookEvent:
    """Return the event of a batch that has ended."""
    return WebhookEvent(
        type=f"batch.{batch.status}",
        timestamp=getattr(batch, f"{batch.status}_at"),
        data=BatchEnded(id=batch.id, organization_id=batch.org_id, project_id=batch.project_id),
    )


def approval_event(asked: Approval) -> WebhookEvent:
    caller = Caller.of(asked.call.caller)
    return WebhookEvent(
        type="mcp.approval_requested",
        timestamp=datetime.fromtimestamp(asked.requested_at_s, UTC),
        data=ApprovalRequested(
            organization_id=asked.call.org_id,
            project_id=caller.project_id,
            approval_id=asked.id,
            server=asked.call.server,
            tool=asked.tool,
            client_id=caller.client,
            decider=asked.call.decider,
            arguments_digest=asked.call.arguments_digest,
            expires_at=datetime.fromtimestamp(asked.expires_at_s, UTC),
        ),
    )


def usd_quantity(amount_pico: Pico) -> Quantity:
    return Quantity(value=format_usd(amount_pico), unit="usd")


def quantity(alert: Alert, amount: int) -> Quantity:
    if kind_of_measure(alert.measure).unit == "usd":
        return usd_quantity(amount)
    return Quantity(value=str(amount), unit="tokens")


def reason(alert: Alert) -> Reason | None:
    return alert.reason if kind_of_measure(alert.measure).has_reason else None


def to_event(alert: Alert) -> WebhookEvent:
    kind = kind_of_measure(alert.measure)
    data = crossed(alert) if kind.is_balance else reached(alert)
    return WebhookEvent(type=kind.event, timestamp=alert.occurred_at, data=data)


def crossed(alert: Alert) -> BalanceCrossed:
    return BalanceCrossed(
        alert_id=alert.id,
        organization_id=alert.org_id,
        threshold=quantity(alert, alert.ceiling),
        left=quantity(alert, alert.used),
        reason=alert.reason,
    )


def reached(alert: Alert) -> ThresholdReached:
    total = alert.period == "total"
    return ThresholdReached(
        alert_id=alert.id,
        organization_id=alert.org_id,
        scope=EventScope(type=alert.scope, id=alert.scope_id),
        measure=alert.measure,
        cap_id=alert.cap_id or None,
        period=EventPeriod(type=alert.period, start=None if total else alert.period_start),
        threshold_percent=alert.threshold,
        limit=quantity(alert, alert.ceiling),
        used=quantity(alert, alert.used),
        reason=reason(alert),
    )


def to_view(alert: Alert) -> AlertView:
    total = alert.period == "total"
    return AlertView(
        id=alert.id,
        type=kind_of_measure(alert.measure).event,
        scope=EventScope(type=alert.scope, id=alert.scope_id),
        measure=alert.measure,
        cap_id=alert.cap_id or None,
        period=alert.period,
        period_start=None if total else int(alert.period_start.timestamp()),
        threshold_percent=alert.threshold,
        limit=quantity(alert, alert.ceiling),
        used=quantity(alert, alert.used),
        reason=reason(alert),
        occurred_at=int(alert.occurred_at.timestamp()),
    )
