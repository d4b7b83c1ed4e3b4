"""Defines the tables of batches. A batch says what it is asked and what has become of it; a line is
one of its requests, and, once it has ended, its answer. What a line used stands in the books by
`event_id`, put there in the transaction that ends the line: neither is ever there without the
other."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

metadata = sa.MetaData()


def _moment(name: str) -> sa.Column[datetime]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=True)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default="0")


def _now(name: str) -> sa.Column[Any]:
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column(name, kind, nullable=False, server_default=sa.func.now())


batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False),
    sa.Column("completion_window", sa.Text, nullable=False),
    sa.Column("metadata", JSONB, nullable=True),
    sa.Column("output_expires_after_s", sa.BigInteger, nullable=True),
    sa.Column("tags", JSONB, nullable=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=True),
    sa.Column("errors", JSONB, nullable=True),
    *(_count(f"num_{kind}") for kind in ("total", "completed", "failed", "unrun")),
    *(_count(f"{kind}_tokens") for kind in ("input", "cached", "output", "reasoning")),
    sa.Column("output_file_id", sa.Text, nullable=True),
    sa.Column("error_file_id", sa.Text, nullable=True),
    _now("created_at"),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
    *(
        _moment(f"{status}_at")
        for status in (
            *("in_progress", "finalizing", "completed", "failed"),
            *("expired", "cancelling", "cancelled", "dispatched", "deleted"),
        )
    ),
    sa.Column("leased_by", sa.Text, nullable=True),
    _moment("leased_until"),
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.Text, nullable=False, server_default="open"),
    _now("due_at"),
    sa.Column("losses", sa.Integer, nullable=False, server_default="0"),
    sa.Column("leased_by", sa.Text, nullable=True),
    _moment("leased_until"),
    sa.Column("request_id", sa.Text, nullable=True),
    sa.Column("event_id", sa.Text, nullable=True),
    sa.Column("status", sa.SmallInteger, nullable=True),
    sa.Column("code", sa.Text, nullable=True),
    sa.Column("answer", sa.LargeBinary, nullable=True),
)
