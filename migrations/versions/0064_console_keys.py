"""Tell which keys the console spends under, one for each user of a project.

Revision ID: 0064
Revises: 0063
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column, create_index, drop_index

revision = "0064"
down_revision = "0063"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("api_keys", "for_console", "boolean", default="false")
    on = "api_keys (project_id, user_id) WHERE for_console"
    create_index("api_keys_for_console", on, unique=True)


def downgrade() -> None:
    drop_index("api_keys_for_console")
    op.execute("ALTER TABLE api_keys DROP COLUMN for_console")
