"""Tables of the audit log, as migration 0007 makes them.

`before` and `after` are canonical JSON as text, not jsonb: what was hashed stands there to the
byte. Triggers and grants keep both tables from everything but growing.
"""

from __future__ import annotations

import sqlalchemy as sa

from gateway.columns import moment, text

metadata = sa.MetaData()


entries = sa.Table(
    "audit_entries",
    metadata,
    text("org_id", key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    text("id"),
    moment("occurred_at", nullable=False),
    text("action"),
    text("target"),
    text("project_id", nullable=True),
    text("actor_kind"),
    text("actor_id"),
    text("on_behalf_of", nullable=True),
    text("ip", nullable=True),
    text("request_id", nullable=True),
    text("before", nullable=True),
    text("after", nullable=True),
    sa.Column("previous", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
)

heads = sa.Table(
    "audit_heads",
    metadata,
    text("org_id", key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
)
