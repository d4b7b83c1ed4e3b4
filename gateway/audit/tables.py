"""Tables of the audit log, as migration 0007 makes them.

`before` and `after` are canonical JSON as text, not jsonb: what was hashed stands there to the
byte. Triggers and grants keep both tables from everything but growing.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=nullable)


entries = sa.Table(
    "audit_entries",
    metadata,
    sa.Column("org_id", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("id"),
    sa.Column("occurred_at", sa.TIMESTAMP(timezone=True), nullable=False),
    _text("action"),
    _text("target"),
    _text("project_id", nullable=True),
    _text("actor_kind"),
    _text("actor_id"),
    _text("on_behalf_of", nullable=True),
    _text("ip", nullable=True),
    _text("request_id", nullable=True),
    _text("before", nullable=True),
    _text("after", nullable=True),
    sa.Column("previous", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
)

heads = sa.Table(
    "audit_heads",
    metadata,
    sa.Column("org_id", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
)
