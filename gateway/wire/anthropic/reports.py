"""Anthropic's organization endpoints for usage and costs: their queries, their pages, their errors.

A workspace is a project of ours, an account is a user. What no usage here has is refused by name
where it is grouped or filtered by (`context_window`, `inference_geo`, `speed`), and null in a
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from billing.events import Component
from billing.money import format_usd
from billing.reports.usage import BATCH, CostRow, UsageRow, line_item
from billing.reports.window import BucketWidth
from gateway.wire.organization.usage import Filter, Number

CENTS = 100
Moment = Annotated[datetime, Meta(tz=True)]
ServiceTier = Literal["standard", "batch", "priority", "flex"]
STANDARD: ServiceTier = "standard"
SERVED_AS: Mapping[ServiceTier, str] = {
    STANDARD: "default",
    "batch": BATCH,
    "priority": "priority",
    "flex": "flex",
}
GROUPS: Mapping[str, str] = {
    "api_key_id": "api_key_id",
    "workspace_id": "project_id",
    "model": "model",
    "service_tier": "served_as",
    "account_id": "user_id",
    "service_account_id": "service_account_id",
}
"""Theirs, and what `reports.usage` calls it."""
DESCRIPTION = ("model", "served_as", "component")
"""The fields that a report grouped by description has."""
TOKEN_TYPES: Mapping[Component, str] = {
    "uncached_input": "uncached_input_tokens",
    "cache_read": "cache_read_input_tokens",
    "cache_write_5m": "cache_creation.ephemeral_5m_input_tokens",
    "cache_write_1h": "cache_creation.ephemeral_1h_input_tokens",
    "output": "output_tokens",
    "reasoning_output": "output_tokens",
    "embedding_input": "uncached_input_tokens",
}
"""The components that are counted in tokens."""
RENAMED = {"start_time": "starting_at", "end_time": "ending_at"}
"""Parameters of `reports.usage` that are called otherwise here."""


class MessagesReportQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    starting_at: Moment
    ending_at: Moment | None = None
    page: str | None = None

    def window(self) -> tuple[int, int | None]:
        """Return the window in Unix seconds."""
        end = self.ending_at
        return int(self.starting_at.timestamp()), None if end is None else int(end.timestamp())


class MessagesQuery(MessagesReportQuery):
    """The query of `GET /v1/organizations/usage_report/messages`."""

    limit: Number | None = None
    bucket_width: BucketWidth = "1d"
    group_by: list[
        Literal[
            "api_key_id",
            "workspace_id",
            "model",
            "service_tier",
            "account_id",
            "service_account_id",
        ]
    ] = []
    account_ids: Filter = []
    service_account_ids: Filter = []
    api_key_ids: Filter = []
    models: Filter = []
    service_tiers: list[ServiceTier] = []
    workspace_ids: Filter = []


class CostReportQuery(MessagesReportQuery):
    """The query of `GET /v1/organizations/cost_report`."""

    limit: Annotated[int, Meta(ge=1, le=31)] | None = None
    bucket_width: Literal["1d"] = "1d"
    group_by: list[Literal["workspace_id", "description"]] = []


# ---- pages


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    ephemeral_1h_input_tokens: int
    ephemeral_5m_input_tokens: int


class ServerToolUse(msgspec.Struct, frozen=True, kw_only=True):
    web_search_requests: int = 0


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A field that was not grouped by is null."""

    uncached_input_tokens: int
    cache_creation: CacheCreation
    cache_read_input_tokens: int
    output_tokens: int
    server_tool_use: ServerToolUse = ServerToolUse()
    api_key_id: str | None = None
    workspace_id: str | None = None
    model: str | None = None
    service_tier: str | None = None
    account_id: str | None = None
    service_account_id: str | None = None
    context_window: None = None
    inference_geo: None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    amount: str
    """Decimal, in cents, exact to the pico-USD."""
    currency: str = "USD"
    workspace_id: str | None = None
    description: str | None = None
    cost_type: str | None = None
    token_type: str | None = None
    model: str | None = None
    service_tier: str | None = None
    context_window: None = None
    inference_geo: None = None


R = TypeVar("R", MessagesUsage, Cost)


class TimeBucket(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    starting_at: str
    ending_at: str
    results: Sequence[R]


class Report(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    data: Sequence[TimeBucket[R]]
    has_more: bool
    next_page: str | None


def to_rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_service_tier(served_as: str | None) -> str | None:
    return STANDARD if served_as == SERVED_AS[STANDARD] else served_as


def to_messages_usage(row: UsageRow) -> MessagesUsage:
    used = row.quantities
    return MessagesUsage(
        uncached_input_tokens=used.uncached_input,
        cache_creation=CacheCreation(
            ephemeral_1h_input_tokens=used.cache_write_1h,
            ephemeral_5m_input_tokens=used.cache_write_5m,
        ),
        cache_read_input_tokens=used.cache_read,
        output_tokens=used.output_total,
        api_key_id=row.api_key_id,
        workspace_id=row.project_id,
        model=row.model,
        service_tier=to_service_tier(row.served_as),
        account_id=row.user_id,
        service_account_id=row.service_account_id,
    )


def to_cost(row: CostRow) -> Cost:
    amount = format_usd(row.amount_pico * CENTS)
    if row.component is None:
        return Cost(amount=amount, workspace_id=row.project_id)
    tier, item = to_service_tier(row.served_as), line_item(row.model, row.component)
    token_type = TOKEN_TYPES.get(row.component)
    return Cost(
        amount=amount,
        workspace_id=row.project_id,
        description=item if tier == STANDARD else f"{item}, {tier}",
        cost_type=row.component if token_type is None else "tokens",
        token_type=token_type,
        model=row.model,
        service_tier=tier,
    )


# ---- errors


class ErrorDetails(msgspec.Struct, frozen=True):
    error_code: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None = None


DETAILS = {"thread": ErrorDetails("thread_unsupported_request")}
"""Error details for fields whose refusal the official SDK's tool loop handles by going on without
them."""
OVERLOADED = 529
ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def to_status(status: int, code: str | None) -> int:
    """Return Anthropic's status: it has others for overload, and for a lack of money."""
    if status == 503:
        return OVERLOADED
    return 402 if code == "insufficient_quota" else status


def to_error_type(status: int) -> str:
    """Return the type of an error with Anthropic's status."""
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def to_anthropic_error(
    status: int, message: str, request_id: str | None, param: str | None = None
) -> AnthropicError:
    details = DETAILS.get(param or "", UNSET)
    body = AnthropicErrorBody(type=to_error_type(status), message=message, details=details)
    return AnthropicError(error=body, request_id=request_id)
