"""Requests for approval that webhooks were not told of yet.

Revision ID: 0056
Revises: 0055
"""

from __future__ import annotations

from alembic import op

revision = "0056"
down_revision = "0055"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE mcp_approvals ADD COLUMN dispatched_at timestamptz",
    "UPDATE mcp_approvals SET dispatched_at = now()",
    "CREATE INDEX mcp_approvals_outbox ON mcp_approvals (id) WHERE dispatched_at IS NULL",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    op.execute("ALTER TABLE mcp_approvals DROP COLUMN dispatched_at")
