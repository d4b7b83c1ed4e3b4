"""OAuth clients: plans.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE oauth_clients ADD COLUMN plan text REFERENCES plans (name)")


def downgrade() -> None:
    op.execute("ALTER TABLE oauth_clients DROP COLUMN plan")
