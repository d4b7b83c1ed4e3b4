"""Keep from which revision on releases run on this schema: an older release that finds a newer
schema reads it.

Revision ID: 0061
Revises: 0060
"""

from __future__ import annotations

from alembic import op

revision = "0061"
down_revision = "0060"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE schema_support (
            only_row boolean PRIMARY KEY DEFAULT true
                CONSTRAINT schema_support_one CHECK (only_row),
            oldest_revision text NOT NULL
        )
        """
    )
    op.execute("INSERT INTO schema_support (oldest_revision) VALUES ('0060')")


def downgrade() -> None:
    op.execute("DROP TABLE schema_support")
