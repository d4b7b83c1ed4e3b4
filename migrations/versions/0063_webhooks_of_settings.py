"""Tell which webhook endpoints follow the settings.

Revision ID: 0063
Revises: 0062
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column

revision = "0063"
down_revision = "0062"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("webhook_endpoints", "settings_name", "text")


def downgrade() -> None:
    op.execute("ALTER TABLE webhook_endpoints DROP COLUMN settings_name")
