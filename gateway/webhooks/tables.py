"""Tables of webhooks: endpoints, which are archived and never deleted, and deliveries to them.

Above: the modules beside it. Below: Postgres; migration 0019 makes what stands here.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

metadata = sa.MetaData()


def _text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _moment(name: str, *, nullable: bool = True) -> sa.Column[Any]:
    default = None if nullable else sa.func.now()
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column(name, kind, nullable=nullable, server_default=default)


endpoints = sa.Table(
    "webhook_endpoints",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    _text("org_id"),
    _text("url"),
    _text("description", nullable=True),
    sa.Column("event_types", ARRAY(sa.Text), nullable=False),
    sa.Column("secret_sealed", sa.LargeBinary, nullable=False),
    _text("secret_id"),
    # The secret before this one, while both sign.
    sa.Column("older_secret_sealed", sa.LargeBinary, nullable=True),
    _text("older_secret_id", nullable=True),
    _moment("older_secret_expires_at"),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    _moment("created_at", nullable=False),
    _moment("disabled_at"),
    _moment("archived_at"),
)

deliveries = sa.Table(
    "webhook_deliveries",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    _text("org_id"),
    _text("endpoint_id"),
    _text("event_id"),
    _text("event_type"),
    _text("body"),
    sa.Column("state", sa.Text, nullable=False, server_default="pending"),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    _moment("due_at", nullable=False),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
    _text("leased_by", nullable=True),
    _moment("leased_until"),
    sa.Column("status", sa.SmallInteger, nullable=True),
    _text("failure", nullable=True),
    _moment("created_at", nullable=False),
    _moment("ended_at"),
)
