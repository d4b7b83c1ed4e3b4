"""Keep of each home which release it runs, and which version of each model: the console shows what
runs where, and what a change of a model has come to.

Revision ID: 0076
Revises: 0075
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0076"
down_revision = "0075"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("installation_homes", "running", "jsonb", default="'{}'")


def downgrade() -> None:
    op.execute("ALTER TABLE installation_homes DROP COLUMN running")
