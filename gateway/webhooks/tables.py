"""Defines the tables of webhooks: endpoints, which are archived and never deleted, and deliveries
to them; and that of e-mails to people."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from gateway.columns import moment, moment_made, text

metadata = sa.MetaData()

endpoints = sa.Table(
    "webhook_endpoints",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    text("org_id"),
    text("url"),
    text("description", nullable=True),
    # The name that it has in the settings, which it follows; NULL: people made it.
    text("settings_name", nullable=True),
    sa.Column("event_types", ARRAY(sa.Text), nullable=False),
    sa.Column("secret_sealed", sa.LargeBinary, nullable=False),
    text("secret_id"),
    # The secret before this one, while both sign.
    sa.Column("older_secret_sealed", sa.LargeBinary, nullable=True),
    text("older_secret_id", nullable=True),
    moment("older_secret_expires_at"),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    moment_made(),
    moment("disabled_at"),
    moment("archived_at"),
)


def _deliveries(name: str, receiver: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.Text, primary_key=True),
        text("org_id"),
        text(receiver),
        text("event_id"),
        text("event_type"),
        text("body"),
        sa.Column("state", sa.Text, nullable=False, server_default="pending"),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        moment_made("due_at"),
        moment("expires_at", nullable=False),
        text("leased_by", nullable=True),
        moment("leased_until"),
        sa.Column("status", sa.SmallInteger, nullable=True),
        text("failure", nullable=True),
        moment_made(),
        moment("ended_at"),
    )


deliveries = _deliveries("webhook_deliveries", "endpoint_id")
mails = _deliveries("mail_deliveries", "user_id")
