"""Index the calls that wait for a person by when their time is over, for who counts them.

Revision ID: 0071
Revises: 0070
"""

from __future__ import annotations

from migrations.online import create_index, drop_index

revision = "0071"
down_revision = "0070"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_index("mcp_approvals_pending", "mcp_approvals (expires_at_s) WHERE state = 'pending'")


def downgrade() -> None:
    drop_index("mcp_approvals_pending")
