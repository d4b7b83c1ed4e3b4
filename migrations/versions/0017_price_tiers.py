"""Prices by service tier.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE price_keys
            ADD COLUMN tier text NOT NULL DEFAULT 'default'
                CHECK (tier IN ('default', 'priority', 'flex')),
            DROP CONSTRAINT price_keys_model_component_key,
            ADD CONSTRAINT price_keys_place UNIQUE (model, tier, component)
        """
    )


def downgrade() -> None:
    op.execute("ALTER TABLE price_keys DROP COLUMN tier")
    op.execute("ALTER TABLE price_keys ADD UNIQUE (model, component)")
