"""Keep of each request which version of its model answered it.

Revision ID: 0078
Revises: 0077
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0078"
down_revision = "0077"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("request_log", "model_version", "integer")


def downgrade() -> None:
    op.execute("ALTER TABLE request_log DROP COLUMN model_version")
