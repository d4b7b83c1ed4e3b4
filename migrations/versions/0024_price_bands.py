"""Prices by the size of the request, the tier of batches, and components of their own for
reasoning, embeddings and calls.

Revision ID: 0024
Revises: 0023
"""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

ADDED = ("reasoning_output", "embedding_input", "tool_call", "batch_queue")
COUNTED = ("usage_events", "usage_hourly")


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE price_keys
            ADD COLUMN min_total_input bigint NOT NULL DEFAULT 0 CHECK (min_total_input >= 0),
            DROP CONSTRAINT price_keys_tier_check,
            ADD CONSTRAINT price_keys_tier_check
                CHECK (tier IN ('default', 'priority', 'flex', 'batch')),
            DROP CONSTRAINT price_keys_place,
            ADD CONSTRAINT price_keys_place UNIQUE (model, tier, component, min_total_input)
        """
    )
    added = ", ".join(
        f"ADD COLUMN {name} bigint NOT NULL DEFAULT 0 CHECK ({name} >= 0),"
        f" ADD COLUMN {name}_pico numeric(38,0) NOT NULL DEFAULT 0 CHECK ({name}_pico >= 0)"
        for name in ADDED
    )
    for table in COUNTED:
        op.execute(f"ALTER TABLE {table} {added}")


def downgrade() -> None:
    dropped = ", ".join(f"DROP COLUMN {name}, DROP COLUMN {name}_pico" for name in ADDED)
    for table in COUNTED:
        op.execute(f"ALTER TABLE {table} {dropped}")
    op.execute(
        """
        ALTER TABLE price_keys
            DROP CONSTRAINT price_keys_place,
            DROP COLUMN min_total_input,
            ADD CONSTRAINT price_keys_place UNIQUE (model, tier, component),
            DROP CONSTRAINT price_keys_tier_check,
            ADD CONSTRAINT price_keys_tier_check CHECK (tier IN ('default', 'priority', 'flex'))
        """
    )
