"""Keep of each batch which request made it, in its trace.

Revision ID: 0073
Revises: 0072
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0073"
down_revision = "0072"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("batches", "traceparent", "text")


def downgrade() -> None:
    op.execute("ALTER TABLE batches DROP COLUMN traceparent")
