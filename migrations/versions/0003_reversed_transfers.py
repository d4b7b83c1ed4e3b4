"""A transfer may be reversed: waste that turned out to be an attempt's own.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KINDS = "'usage', 'waste', 'suspense', 'repriced'"


def upgrade() -> None:
    allow(f"{KINDS}, 'reversed'")


def downgrade() -> None:
    """Raises: IntegrityError where something was reversed; transfers are never deleted."""
    allow(KINDS)


def allow(kinds: str) -> None:
    op.execute(
        "ALTER TABLE transfers DROP CONSTRAINT transfers_kind_check,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({kinds}))"
    )
