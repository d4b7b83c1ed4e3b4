"""Anthropic's message batches: how one is asked for, shown and listed, and a line of its results.

Structs only; names and types are the official SDK's. What a batch is asked is read by
`batched_requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from gateway.wire.anthropic.batched_requests import CUSTOM_ID, MAX_REQUESTS
from gateway.wire.anthropic.reports import to_rfc3339
from gateway.wire.shared.batch import ENDED, Batch, Status

MAX_PAGE = 1000
PAGE = 20
BatchCursor = Annotated[str, Meta(min_length=1, max_length=200)]
ProcessingStatus = Literal["in_progress", "canceling", "ended"]


class NewBatchedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=CUSTOM_ID)]
    params: dict[str, Any]
    """A body of `/v1/messages`."""


class NewMessageBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    requests: Annotated[list[NewBatchedRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]


class MessageBatchesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    before_id: BatchCursor | None = None
    after_id: BatchCursor | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = PAGE
    beta: bool | None = None
    """Older SDKs say so of their beta namespace, whose batches are the same."""


class MessageBatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a batch: all requests are `processing` until it has ended, as Anthropic
    counts."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatchObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: ProcessingStatus
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchPage(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[MessageBatchObject]
    has_more: bool
    """In the direction that was asked for."""
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def to_message_batch(
    batch: Batch, *, results_url: str, kept_for: timedelta, now: datetime
) -> MessageBatchObject:
    """Return a batch as Anthropic shows it. `results_url`: where its results are once it has ended;
    `kept_for`: how long, from then."""
    has_ended = batch.status in ENDED
    ended_at = _ended_at(batch)
    archived_at = None if ended_at is None or ended_at + kept_for > now else ended_at + kept_for
    return MessageBatchObject(
        id=batch.id,
        processing_status=processing_status(batch.status),
        request_counts=to_counts(batch) if has_ended else _all_processing(batch),
        created_at=_text(batch.created_at) or "",
        expires_at=_text(batch.expires_at) or "",
        ended_at=_text(ended_at),
        cancel_initiated_at=_text(batch.cancelling_at),
        archived_at=_text(archived_at),
        results_url=results_url if batch.output_file_id and archived_at is None else None,
    )


def processing_status(status: Status) -> ProcessingStatus:
    if status in ENDED:
        return "ended"
    return "canceling" if status == "cancelling" else "in_progress"


def to_counts(batch: Batch) -> MessageBatchCounts:
    """Return the counts of a batch that has ended."""
    if batch.status == "failed":  # it could not be read again, and nothing of it was run
        return MessageBatchCounts(errored=batch.num_total)
    unrun = "canceled" if batch.status == "cancelled" else "expired"
    return MessageBatchCounts(
        succeeded=batch.num_completed,
        errored=batch.num_failed - batch.num_unrun,
        **{unrun: batch.num_unrun},
    )


def _all_processing(batch: Batch) -> MessageBatchCounts:
    return MessageBatchCounts(processing=batch.num_total)


def _ended_at(batch: Batch) -> datetime | None:
    found = getattr(batch, f"{batch.status}_at") if batch.status in ENDED else None
    assert found is None or isinstance(found, datetime)
    return found


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else to_rfc3339(int(moment.timestamp()))


# ---- results


class SucceededResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="succeeded"):
    message: Raw


class ErroredResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="errored"):
    error: Raw


class CanceledResult(msgspec.Struct, frozen=True, tag_field="type", tag="canceled"):
    pass


class ExpiredResult(msgspec.Struct, frozen=True, tag_field="type", tag="expired"):
    pass


class IndividualResponse(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    result: SucceededResult | ErroredResult | CanceledResult | ExpiredResult
