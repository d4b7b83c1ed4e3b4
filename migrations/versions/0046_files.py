"""Files of projects, and their content in rows.

Revision ID: 0046
Revises: 0045
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE files (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        project_id text NOT NULL,
        purpose text NOT NULL,
        filename text NOT NULL,
        size_bytes bigint NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz,
        uploading_since timestamptz,
        deleted_at timestamptz,
        CONSTRAINT files_of_org UNIQUE (org_id, id),
        CONSTRAINT files_of_project
            FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id),
        CONSTRAINT files_size CHECK (size_bytes >= 0)
    )
    """,
    "CREATE INDEX files_listed ON files (org_id, project_id, id)",
    "CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL",
    "CREATE INDEX files_deleted ON files (id) WHERE deleted_at IS NOT NULL",
    "CREATE INDEX files_uploading ON files (uploading_since) WHERE uploading_since IS NOT NULL",
    """
    CREATE TABLE file_chunks (
        file_id text NOT NULL,
        number integer NOT NULL,
        org_id text NOT NULL,
        data bytea NOT NULL,
        PRIMARY KEY (file_id, number),
        CONSTRAINT file_chunks_of_file FOREIGN KEY (org_id, file_id)
            REFERENCES files (org_id, id) ON DELETE CASCADE
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    protect("files", delete=True)
    protect("file_chunks", delete=True)


def downgrade() -> None:
    for table in ("file_chunks", "files"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
