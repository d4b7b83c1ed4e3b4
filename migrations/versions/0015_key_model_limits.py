"""API keys: limits of their own by model.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE api_keys ADD COLUMN model_limits jsonb")
    op.execute(
        "ALTER TABLE api_keys ADD CONSTRAINT api_keys_model_limits"
        " CHECK (jsonb_typeof(model_limits) = 'object' AND model_limits <> '{}')"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE api_keys DROP COLUMN model_limits")
