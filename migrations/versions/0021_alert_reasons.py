"""Alerts: what raised them.

All that stand were raised by what was spent; a worker that does not know the column yet raises
nothing else.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE alerts ADD COLUMN reason text NOT NULL DEFAULT 'spent'"
        " CONSTRAINT alerts_reason CHECK (reason IN ('spent', 'refused'))"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE alerts DROP COLUMN reason")
