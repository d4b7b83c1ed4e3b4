"""Note where the content of a file is: in rows, or on the store that was configured when it was
made.

Revision ID: 0052
Revises: 0051
"""

from __future__ import annotations

from alembic import op

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE files ADD COLUMN stored_in text NOT NULL DEFAULT 'postgres'")


def downgrade() -> None:
    op.execute("ALTER TABLE files DROP COLUMN stored_in")
