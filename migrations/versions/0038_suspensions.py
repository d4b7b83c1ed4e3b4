"""Suspensions for unpaid invoices: until when an operator has lifted them.

Revision ID: 0038
Revises: 0037
"""

from __future__ import annotations

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE orgs ADD COLUMN suspension_lifted_at timestamptz")


def downgrade() -> None:
    op.execute("ALTER TABLE orgs DROP COLUMN suspension_lifted_at")
