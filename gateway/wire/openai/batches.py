"""OpenAI's batches: how one is asked for, and how it is shown.

Structs only; names and types are the official SDK's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.tenancy.pages import Order
from gateway.wire.openai.files import ExpirySeconds
from gateway.wire.shared.batch import Batch, Status
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of

MAX_METADATA = 16
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
BatchMetadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]


class BatchesQuery(PageQuery):
    order: Order = "desc"


class OutputExpiresAfter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class NewBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=200)]
    endpoint: Annotated[str, Meta(min_length=1, max_length=64)]
    completion_window: Literal["24h"]
    metadata: BatchMetadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    @property
    def output_expires_after_s(self) -> int | None:
        return None if self.output_expires_after is None else self.output_expires_after.seconds


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: Usage
    metadata: dict[str, str] | None


def to_batch_object(batch: Batch) -> BatchObject:
    return view_of(
        BatchObject,
        batch,
        errors=None if batch.errors is None else BatchErrors(data=batch.errors),
        request_counts=RequestCounts(
            total=batch.num_total, completed=batch.num_completed, failed=batch.num_failed
        ),
        usage=Usage(
            input_tokens=batch.input_tokens,
            input_tokens_details=InputDetails(cached_tokens=batch.cached_tokens),
            output_tokens=batch.output_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=batch.reasoning_tokens),
            total_tokens=batch.input_tokens + batch.output_tokens,
        ),
    )


MAX_CUSTOM_ID_CHARS = 512


class WrittenLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: str
    url: str
    body: msgspec.Raw
