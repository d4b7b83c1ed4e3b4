"""A batch as both vendors' formats show it, and the states that it can be in.

`gateway.batches` keeps it; what comes after which state says `gateway.batches.states`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Shape = Literal["openai", "anthropic"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its row in Postgres has it."""

    id: str
    org_id: str
    project_id: str
    key_id: str
    """The key whose limits, prices and permissions its requests run under."""
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Any
    """A mapping of texts, or none; one text while it is sealed."""
    metadata_secret_id: str | None
    output_expires_after_s: int | None
    tags: dict[str, str] | None
    status: Status
    model: str | None
    errors: Any
    """A list of mappings, or none; one text while they are sealed."""
    errors_secret_id: str | None
    num_total: int
    num_completed: int
    num_failed: int
    num_unrun: int
    """The number of failed lines that were never run."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    output_file_id: str | None
    error_file_id: str | None
    created_at: datetime
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
