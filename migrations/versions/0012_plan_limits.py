"""Plans: limits of input and output apart, and of batches by the day.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

LIMITS = ("input_tokens_per_minute", "output_tokens_per_minute", "batch_tokens_per_day")


def upgrade() -> None:
    for column in LIMITS:
        op.execute(f"ALTER TABLE plans ADD COLUMN {column} bigint")
        op.execute(f"ALTER TABLE plans ADD CONSTRAINT plans_{column} CHECK ({column} >= 0)")


def downgrade() -> None:
    for column in LIMITS:
        op.execute(f"ALTER TABLE plans DROP COLUMN {column}")
