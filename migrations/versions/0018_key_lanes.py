"""API keys: the lane that one is marked for.

Revision ID: 0018
Revises: 0017
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE api_keys ADD COLUMN lane text"
        " CONSTRAINT api_keys_lane CHECK (lane IN ('agentic', 'batch'))"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE api_keys DROP COLUMN lane")
