"""Defines the tables of batches. A batch says what it is asked and what has become of it; a line is
one of its requests, and, once it has ended, its answer. What a line used stands in the books by
`event_id`, put there in the transaction that ends the line: neither is ever there without the
other. `traceparent` names the request that made a batch in its trace. What tenants wrote and were
answered is sealed (`sealing`)."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from gateway.columns import moment, moment_made, text

metadata = sa.MetaData()


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default="0")


batches = sa.Table(
    "batches",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("project_id"),
    text("key_id"),
    text("endpoint"),
    text("input_file_id"),
    text("completion_window"),
    sa.Column("metadata", JSONB, nullable=True),
    text("metadata_secret_id", nullable=True),
    sa.Column("output_expires_after_s", sa.BigInteger, nullable=True),
    sa.Column("tags", JSONB, nullable=True),
    text("status"),
    text("model", nullable=True),
    sa.Column("errors", JSONB, nullable=True),
    text("errors_secret_id", nullable=True),
    *(_count(f"num_{kind}") for kind in ("total", "completed", "failed", "unrun")),
    *(_count(f"{kind}_tokens") for kind in ("input", "cached", "output", "reasoning")),
    text("output_file_id", nullable=True),
    text("error_file_id", nullable=True),
    moment_made(),
    moment("expires_at", nullable=False),
    *(
        moment(f"{status}_at")
        for status in (
            *("in_progress", "finalizing", "completed", "failed"),
            *("expired", "cancelling", "cancelled", "dispatched", "deleted"),
        )
    ),
    text("leased_by", nullable=True),
    moment("leased_until"),
    text("traceparent", nullable=True),
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    text("batch_id", key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    text("org_id"),
    text("custom_id"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    text("secret_id", nullable=True),
    sa.Column("state", sa.Text, nullable=False, server_default="open"),
    moment_made("due_at"),
    sa.Column("losses", sa.Integer, nullable=False, server_default="0"),
    text("leased_by", nullable=True),
    moment("leased_until"),
    text("request_id", nullable=True),
    text("event_id", nullable=True),
    sa.Column("status", sa.SmallInteger, nullable=True),
    text("code", nullable=True),
    sa.Column("answer", sa.LargeBinary, nullable=True),
    text("answer_secret_id", nullable=True),
)
