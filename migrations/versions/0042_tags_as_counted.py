"""Add up again from their days what tags are said to have spent: it had grown by what those days
count as another's.

Revision ID: 0042
Revises: 0041
"""

from __future__ import annotations

from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Delete the sums: whoever books for a scope with a cap and finds no sum adds it up."""
    op.execute("DELETE FROM spend_to_date WHERE scope = 'tag'")


def downgrade() -> None:
    """Do nothing: what is added up anew is no other schema."""
