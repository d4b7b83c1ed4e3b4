"""The table of upstream credentials."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.columns import moment, moment_made, text, texts

metadata = sa.MetaData()

credentials = sa.Table(
    "upstream_credentials",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("upstream"),
    text("user_id", nullable=True),
    text("kind"),
    texts("names"),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("wrapped_key", sa.LargeBinary, nullable=False),
    text("secret_id"),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    moment("expires_at"),
    moment("refused_at"),
    moment_made(),
    moment_made("updated_at"),
)
