"""Keep of each request that failed the code of the error that its client was told.

Revision ID: 0075
Revises: 0074
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0075"
down_revision = "0074"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("request_log", "error_code", "text")


def downgrade() -> None:
    op.execute("ALTER TABLE request_log DROP COLUMN error_code")
