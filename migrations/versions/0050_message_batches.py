"""Batches of Anthropic's messages: how many requests were never run, and that one was deleted.

Revision ID: 0050
Revises: 0049
"""

from __future__ import annotations

from alembic import op

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE batches
            ADD COLUMN num_unrun bigint NOT NULL DEFAULT 0,
            ADD COLUMN deleted_at timestamptz
        """
    )


def downgrade() -> None:
    op.execute("ALTER TABLE batches DROP COLUMN num_unrun, DROP COLUMN deleted_at")
