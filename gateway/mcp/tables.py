"""The tables of trust in MCP servers."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.columns import moment_made, text

metadata = sa.MetaData()

pins = sa.Table(
    "mcp_pins",
    metadata,
    text("org_id", key=True),
    text("server", key=True),
    text("kind", key=True),
    text("name", key=True),
    text("digest"),
    sa.Column("body", sa.LargeBinary, nullable=False),
    moment_made("approved_at"),
)
rules = sa.Table(
    "mcp_rules",
    metadata,
    text("org_id", key=True),
    text("body"),
    moment_made("updated_at"),
)
approvals = sa.Table(
    "mcp_approvals",
    metadata,
    text("org_id", key=True),
    text("id", key=True),
    text("call_key"),
    text("state"),
    sa.Column("expires_at_s", sa.Double, nullable=False),
    text("body"),
    moment_made(),
    sa.Column("dispatched_at", sa.DateTime(timezone=True)),
    sa.Column("arguments", sa.LargeBinary),
    sa.Column("secret_id", sa.Text),
)
