"""Defines the tables of what the Responses API keeps. What a customer wrote and was answered is
sealed; what must be searched stands beside it."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.responses.kept import ResponseOwner

metadata = sa.MetaData()

responses = sa.Table(
    "responses",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("previous_id", sa.Text, nullable=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column(
        "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
    ),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=False),
    sa.Column("background", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("beat_at", sa.TIMESTAMP(timezone=True), nullable=True),
)

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column(
        "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
    ),
    sa.Column("metadata", sa.LargeBinary, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=False),
    sa.Column("next_position", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
)

conversation_items = sa.Table(
    "conversation_items",
    metadata,
    sa.Column("conversation_id", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=False),
)

response_events = sa.Table(
    "response_events",
    metadata,
    sa.Column("response_id", sa.Text, primary_key=True),
    sa.Column("first_number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("last_number", sa.BigInteger, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=False),
    sa.Column(
        "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
    ),
)


def owned(table: sa.Table, owner: ResponseOwner) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the condition for the rows of a project."""
    return (table.c.org_id == owner.org_id, table.c.project_id == owner.project_id)
