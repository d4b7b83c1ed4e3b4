"""Keep of each request why no more of its prompt was cached.

Revision ID: 0067
Revises: 0066
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0067"
down_revision = "0066"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("request_log", "cache_cause", "text")
    add_column("request_log", "cache_position", "integer")


def downgrade() -> None:
    op.execute("ALTER TABLE request_log DROP COLUMN cache_cause, DROP COLUMN cache_position")
