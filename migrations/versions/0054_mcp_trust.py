"""Keep what an org approved of MCP servers, its rules for calls, and the calls that wait for a
person.

Revision ID: 0054
Revises: 0053
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0054"
down_revision = "0053"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE mcp_pins (
        org_id text NOT NULL REFERENCES orgs,
        server text NOT NULL,
        kind text NOT NULL,
        name text NOT NULL,
        digest text NOT NULL,
        body bytea NOT NULL,
        approved_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (org_id, server, kind, name)
    )
    """,
    """
    CREATE TABLE mcp_rules (
        org_id text PRIMARY KEY REFERENCES orgs,
        body text NOT NULL,
        updated_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE TABLE mcp_approvals (
        org_id text NOT NULL REFERENCES orgs,
        id text NOT NULL,
        call_key text NOT NULL,
        state text NOT NULL,
        expires_at_s double precision NOT NULL,
        body text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (org_id, id)
    )
    """,
    """
    CREATE INDEX mcp_approvals_waiting ON mcp_approvals (org_id, call_key)
        WHERE state IN ('pending', 'approved')
    """,
)
TABLES = ("mcp_pins", "mcp_rules", "mcp_approvals")


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table in TABLES:
        protect(table, delete=True)


def downgrade() -> None:
    for table in TABLES:
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
