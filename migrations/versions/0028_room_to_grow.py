"""Room to grow in place: what every batch changes finds place beside its old version.

A balance or an hour that is full of others moves with every change, and takes its index entries
with it.

Revision ID: 0028
Revises: 0027
"""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

FILL_PERCENT = {"balances": 30, "usage_hourly": 60, "usage_daily": 50, "spend_to_date": 30}


def upgrade() -> None:
    for table, percent in FILL_PERCENT.items():
        op.execute(f"ALTER TABLE {table} SET (fillfactor = {percent})")


def downgrade() -> None:
    for table in FILL_PERCENT:
        op.execute(f"ALTER TABLE {table} RESET (fillfactor)")
