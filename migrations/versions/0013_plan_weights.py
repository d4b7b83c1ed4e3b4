"""Plans: what an org weighs among others in a lane.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE plans ADD COLUMN weight double precision")
    op.execute(
        "ALTER TABLE plans ADD CONSTRAINT plans_weight CHECK (weight BETWEEN 1.0 / 64 AND 64)"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE plans DROP COLUMN weight")
