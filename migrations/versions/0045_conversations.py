"""Conversations, and what is said in them.

Revision ID: 0045
Revises: 0044
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE conversations (
            id text PRIMARY KEY,
            org_id text NOT NULL,
            project_id text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            metadata bytea NOT NULL,
            secret_id text NOT NULL,
            next_position bigint NOT NULL DEFAULT 0,
            size_bytes bigint NOT NULL DEFAULT 0,
            FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id)
        )
        """
    )
    op.execute(
        """
        CREATE TABLE conversation_items (
            conversation_id text NOT NULL REFERENCES conversations ON DELETE CASCADE,
            id text NOT NULL,
            org_id text NOT NULL,
            project_id text NOT NULL,
            position bigint NOT NULL,
            content bytea NOT NULL,
            secret_id text NOT NULL,
            PRIMARY KEY (conversation_id, id),
            UNIQUE (conversation_id, position),
            FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id)
        )
        """
    )
    for table in ("conversations", "conversation_items"):
        protect(table, delete=True)


def downgrade() -> None:
    for table in ("conversation_items", "conversations"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
