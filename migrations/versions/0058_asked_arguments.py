"""The arguments of calls that wait for a person, sealed, while they wait.

Revision ID: 0058
Revises: 0057
"""

from __future__ import annotations

from alembic import op

revision = "0058"
down_revision = "0057"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE mcp_approvals ADD COLUMN arguments bytea, ADD COLUMN secret_id text",
    "CREATE INDEX mcp_approvals_shown ON mcp_approvals (expires_at_s) WHERE arguments IS NOT NULL",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    op.execute("ALTER TABLE mcp_approvals DROP COLUMN arguments, DROP COLUMN secret_id")
