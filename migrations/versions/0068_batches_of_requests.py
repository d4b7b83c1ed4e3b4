"""Keep of each request the batch whose line it is, and its tags.

Revision ID: 0068
Revises: 0067
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column, create_index

revision = "0068"
down_revision = "0067"
branch_labels = None
depends_on = None

PARTITIONS = "SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'request_log'::regclass"


def upgrade() -> None:
    add_column("request_log", "batch", "text")
    add_column("request_log", "tags", "json")
    # Days that are made from here on get the index from the table; those that are there one by one.
    columns = "(org, batch, at, id) WHERE batch IS NOT NULL"
    op.execute(f"CREATE INDEX IF NOT EXISTS request_log_batch ON ONLY request_log {columns}")
    for day in op.get_bind().exec_driver_sql(PARTITIONS).scalars().all():
        create_index(f"{day}_batch", f"{day} {columns}")
        op.execute(f"ALTER INDEX request_log_batch ATTACH PARTITION {day}_batch")


def downgrade() -> None:
    op.execute("DROP INDEX request_log_batch")
    op.execute("ALTER TABLE request_log DROP COLUMN batch, DROP COLUMN tags")
