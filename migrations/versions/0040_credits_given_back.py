"""Find what became of credits without an invoice, for a journal.

Revision ID: 0040
Revises: 0039
"""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE INDEX transfers_given_back ON transfers (debit)
        WHERE kind IN ('expired', 'revoked')
    """)


def downgrade() -> None:
    op.execute("DROP INDEX transfers_given_back")
