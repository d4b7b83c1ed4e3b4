"""Revocations of signing keys: they reach every process as those of tokens do.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

BEFORE = "'grant', 'token', 'client', 'user'"


def upgrade() -> None:
    _allow(f"{BEFORE}, 'key'")


def downgrade() -> None:
    op.execute("DELETE FROM revocations WHERE kind = 'key'")
    _allow(BEFORE)


def _allow(kinds: str) -> None:
    op.execute("ALTER TABLE revocations DROP CONSTRAINT revocations_kind_check")
    op.execute(
        f"ALTER TABLE revocations ADD CONSTRAINT revocations_kind_check CHECK (kind IN ({kinds}))"
    )
