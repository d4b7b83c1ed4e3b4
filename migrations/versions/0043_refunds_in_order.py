"""When a lease was refunded, in the order of postings: a re-rating leaves alone what was refunded
behind its cutoff. Without a number it was before any.

Revision ID: 0043
Revises: 0042
"""

from __future__ import annotations

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE cache_leases ADD COLUMN refund_seq bigint")


def downgrade() -> None:
    op.execute("ALTER TABLE cache_leases DROP COLUMN refund_seq")
