"""Defines the tables of what the Responses API keeps. What a customer wrote and was answered is
sealed; what must be searched stands beside it."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.columns import moment, moment_made, text
from gateway.responses.kept import ResponseOwner

metadata = sa.MetaData()

responses = sa.Table(
    "responses",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("project_id"),
    text("previous_id", nullable=True),
    text("status"),
    moment_made(),
    moment("expires_at", nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    text("secret_id"),
    sa.Column("background", sa.Boolean, nullable=False, server_default=sa.false()),
    moment("beat_at"),
)

conversations = sa.Table(
    "conversations",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("project_id"),
    moment_made(),
    sa.Column("metadata", sa.LargeBinary, nullable=False),
    text("secret_id"),
    sa.Column("next_position", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
)

conversation_items = sa.Table(
    "conversation_items",
    metadata,
    text("conversation_id", key=True),
    text("id", key=True),
    text("org_id"),
    text("project_id"),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    text("secret_id"),
)

response_events = sa.Table(
    "response_events",
    metadata,
    text("response_id", key=True),
    sa.Column("first_number", sa.BigInteger, primary_key=True, autoincrement=False),
    text("org_id"),
    sa.Column("last_number", sa.BigInteger, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    text("secret_id"),
    moment_made(),
)


def owned(table: sa.Table, owner: ResponseOwner) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the condition for the rows of a project."""
    return (table.c.org_id == owner.org_id, table.c.project_id == owner.project_id)
