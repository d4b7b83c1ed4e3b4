"""A customer's own view: what a key may spend and has spent, and what became of one request.

The names are OpenRouter's where it has them, and its money is a number; beside it the same stands
as decimal strings with their currency.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, UnsetType

from billing.events import UsageEvent
from billing.ledger.tags import tags_of
from billing.money import Pico, format_usd, to_decimal
from billing.pricing.rating import rate
from billing.reports.request_record import CreditPayment, TransferRecord
from billing.tables import to_microseconds
from gateway.request_errors import BadField
from gateway.wire.organization.usage import UsdNumber
from gateway.wire.shared.resource import view_of
from gateway.wire.usage.cost import CURRENCY, ComponentCost, to_usage_cost

UsdNumberOrNull = Annotated[Any, Meta(extra_json_schema={"type": ["number", "null"]})]
Status = Literal["running", "pending", "booked"]
_ID = re.compile(r"(?:req_|chatcmpl-|msg_)([0-9a-f]{12}7[0-9a-f]{19})", re.ASCII)
_encoder = msgspec.json.Encoder(decimal_format="number")


class GenerationQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=64)]
    """`x-request-id` of the answer, or the `id` of a completion of a model of ours."""


def read_request_id(text: str) -> tuple[str, float]:
    """The request's id, and when it was made. Raises: BadField."""
    found = _ID.fullmatch(text)
    if found is None:
        raise BadField("Invalid value for 'id': it is no id of a request.", param="id")
    milliseconds = UUID(found[1]).int >> 80
    return f"req_{found[1]}", milliseconds / 1000


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    debit: str
    credit: str
    amount: str
    currency: str = CURRENCY
    kind: str
    phase: str
    corrects: str | None
    posted_at: str


class PaidBy(msgspec.Struct, frozen=True, kw_only=True):
    """A credit, and what it has paid."""

    credit_id: str
    amount: str
    currency: str = CURRENCY


class DisputedView(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the model's upstream claimed beyond what the request can have used: nobody is
    billed for them."""

    input_tokens: int
    output_tokens: int


class AttemptView(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, or one call of a tool (whose model is `mcp/SERVER`). `amount` is quantities x
    prices; `waste` is the house's, not the org's."""

    id: str
    model: str
    status: Status
    kind: str
    finish: str | None
    """None while it runs."""
    estimated: bool
    lane: str
    tier: str
    admitted_at: str
    ended_at: str
    amount: str
    currency: str = CURRENCY
    components: dict[str, ComponentCost]
    unpriced: tuple[str, ...]
    disputed: DisputedView | None
    transfers: list[TransferView]
    paid_by: list[PaidBy]
    """By now; the rest is on an invoice, or waits for credit."""


class GenerationData(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    status: Status
    """`running`, or over and not in the books yet (`pending`): then nothing was charged so far and
    the cost is what it comes to."""
    model: str
    created_at: str
    total_cost: UsdNumber
    usage: UsdNumber
    cost: str
    currency: str = CURRENCY
    cancelled: bool
    finish_reason: str | None
    latency: int
    """Milliseconds from the admission to the end."""
    tokens_prompt: int
    tokens_completion: int
    native_tokens_prompt: int
    native_tokens_completion: int
    native_tokens_reasoning: int
    native_tokens_cached: int
    cache_write_tokens: int
    org_id: str
    project_id: str
    api_key_id: str
    tags: dict[str, str]
    """The tags that the request carried."""
    attempts: list[AttemptView]


class GenerationView(msgspec.Struct, frozen=True):
    data: GenerationData


def to_rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def to_attempt(event: UsageEvent, known: KnownAttempts) -> AttemptView:
    attempt, cost = event.attempt, to_usage_cost(rate(event.quantities, event.attempt.prices))
    return AttemptView(
        id=event.id,
        model=attempt.model,
        status=known.status,
        kind=event.kind,
        finish=None if known.status == "running" else event.finish,
        estimated=event.estimated,
        lane=attempt.lane,
        tier=attempt.tier,
        admitted_at=to_rfc3339(attempt.admitted_at),
        ended_at=to_rfc3339(event.occurred_at),
        amount=cost.amount,
        components={str(name): each for name, each in cost.components.items()},
        unpriced=cost.unpriced,
        disputed=to_disputed(event),
        transfers=[to_transfer(each) for each in known.transfers if each.event_id == event.id],
        paid_by=[
            PaidBy(credit_id=each.credit_id, amount=format_usd(each.amount_pico))
            for each in known.paid
            if each.event_id == event.id
        ],
    )


def to_disputed(event: UsageEvent) -> DisputedView | None:
    found = event.disputed
    if isinstance(found, UnsetType):
        return None
    return DisputedView(input_tokens=found.input_tokens, output_tokens=found.output_tokens)


def to_transfer(moved: TransferRecord) -> TransferView:
    return view_of(
        TransferView,
        moved,
        amount=format_usd(moved.amount_pico),
        posted_at=moved.posted_at.isoformat(timespec="milliseconds"),
    )


class KnownAttempts(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts that are known of a request: every one of them, the last one last."""

    events: list[UsageEvent]
    status: Status
    transfers: Sequence[TransferRecord] = ()
    paid: Sequence[CreditPayment] = ()
    charged_pico: Pico


def latency_ms_of(event: UsageEvent) -> int:
    """Return the time from admission to the end, of moments as Postgres keeps them: a request says
    the same before and after it is there."""
    took_us = to_microseconds(event.occurred_at) - to_microseconds(event.attempt.admitted_at)
    return round(took_us / 1000)


def to_generation(known: KnownAttempts) -> GenerationView:
    """Show what the customer got: the house's waste is in the attempts alone, as is which tools
    were called."""
    made = [each for each in known.events if not each.quantities.tool_call] or known.events
    last = next((each for each in reversed(made) if each.kind == "usage"), made[-1])
    billed = [each.quantities for each in known.events if each.kind == "usage"]
    prompt, output = (
        sum(each.input_total for each in billed), sum(each.output_total for each in billed)
    )  # fmt: skip
    amount = to_decimal(known.charged_pico)
    data = GenerationData(
        id=last.attempt.request_id,
        status=known.status,
        model=last.attempt.model,
        created_at=to_rfc3339(last.attempt.admitted_at),
        total_cost=amount,
        usage=amount,
        cost=format_usd(known.charged_pico),
        cancelled=last.finish == "disconnect",
        finish_reason=None if known.status == "running" else last.finish,
        latency=latency_ms_of(last),
        tokens_prompt=prompt,
        tokens_completion=output,
        native_tokens_prompt=prompt,
        native_tokens_completion=output,
        native_tokens_reasoning=sum(each.reasoning_output for each in billed),
        native_tokens_cached=sum(each.cache_read for each in billed),
        cache_write_tokens=sum(each.cache_write_5m + each.cache_write_1h for each in billed),
        org_id=last.attempt.org,
        project_id=last.attempt.project,
        api_key_id=last.attempt.key,
        tags=tags_of(last.attempt),
        attempts=[to_attempt(each, known) for each in known.events],
    )
    return GenerationView(data)


# ---- a key


class RateLimitView(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` -1: nothing limits them."""

    requests: int
    interval: str = "60s"


class KeyAmounts(msgspec.Struct, frozen=True, kw_only=True):
    currency: str = CURRENCY
    usage: str
    usage_daily: str
    usage_weekly: str
    usage_monthly: str
    limit: str | None
    limit_remaining: str | None


class KeyData(msgspec.Struct, frozen=True, kw_only=True):
    """Usage is what the books have; days, weeks (from Monday) and months are UTC's. The limit is
    the hard cap of the key itself of which the least is left."""

    id: str
    label: str
    usage: UsdNumber
    usage_daily: UsdNumber
    usage_weekly: UsdNumber
    usage_monthly: UsdNumber
    limit: UsdNumberOrNull
    limit_remaining: UsdNumberOrNull
    limit_reset: Literal["daily", "monthly"] | None
    is_free_tier: bool = False
    is_provisioning_key: bool
    rate_limit: RateLimitView
    amounts: KeyAmounts
    org_id: str
    project_id: str


class OwnKey(msgspec.Struct, frozen=True):
    data: KeyData


def encode(thing: msgspec.Struct) -> bytes:
    return _encoder.encode(thing)
