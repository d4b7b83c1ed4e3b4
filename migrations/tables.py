"""The tables of the migrations themselves, beside Alembic's own."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

schema_support = sa.Table(
    "schema_support",
    metadata,
    # One row: which releases this schema serves, by the revision of the oldest.
    sa.Column("only_row", sa.Boolean, primary_key=True),
    sa.Column("oldest_revision", sa.Text, nullable=False),
)
