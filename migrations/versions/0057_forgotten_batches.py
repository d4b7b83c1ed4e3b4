"""Batches that were deleted are forgotten: their rows may go.

Revision ID: 0057
Revises: 0056
"""

from __future__ import annotations

from alembic import op

from migrations.walls import ROLE_SYSTEM

revision = "0057"
down_revision = "0056"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(f"GRANT DELETE ON batches TO {ROLE_SYSTEM}")
    op.execute("CREATE INDEX batches_deleted ON batches (id) WHERE deleted_at IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX batches_deleted")
    op.execute(f"REVOKE DELETE ON batches FROM {ROLE_SYSTEM}")
