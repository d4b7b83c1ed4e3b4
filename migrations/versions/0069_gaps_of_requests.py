"""Keep of each request two quantiles of the gaps between its tokens, and histograms of them in the
sums.

Revision ID: 0069
Revises: 0068
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0069"
down_revision = "0068"
branch_labels = None
depends_on = None

SUMS = ("requests_hourly", "requests_daily")


def upgrade() -> None:
    add_column("request_log", "itl_p50_us", "bigint")
    add_column("request_log", "itl_p99_us", "bigint")
    for table in SUMS:
        add_column(table, "itl", "numeric", default="0")


def downgrade() -> None:
    op.execute("ALTER TABLE request_log DROP COLUMN itl_p50_us, DROP COLUMN itl_p99_us")
    for table in SUMS:
        op.execute(f"ALTER TABLE {table} DROP COLUMN itl")
