"""Responses that are kept, for a time; and whether a project keeps any.

Revision ID: 0044
Revises: 0043
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE projects ADD COLUMN zero_retention boolean NOT NULL DEFAULT false")
    op.execute(
        """
        CREATE TABLE responses (
            id text PRIMARY KEY,
            org_id text NOT NULL,
            project_id text NOT NULL,
            previous_id text,
            status text NOT NULL CHECK (status IN
                ('completed', 'failed', 'in_progress', 'cancelled', 'queued', 'incomplete')),
            created_at timestamptz NOT NULL DEFAULT now(),
            expires_at timestamptz NOT NULL,
            content bytea NOT NULL,
            secret_id text NOT NULL,
            background boolean NOT NULL DEFAULT false,
            beat_at timestamptz,
            FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id)
        )
        """
    )
    op.execute("CREATE INDEX responses_expires_at ON responses (expires_at)")
    op.execute(
        "CREATE INDEX responses_previous_id ON responses (org_id, previous_id)"
        " WHERE previous_id IS NOT NULL"
    )
    op.execute(
        "CREATE INDEX responses_running ON responses (org_id, beat_at)"
        " WHERE status IN ('queued', 'in_progress')"
    )
    protect("responses", delete=True)


def downgrade() -> None:
    open_wall("responses")
    op.execute("DROP TABLE responses")
    op.execute("ALTER TABLE projects DROP COLUMN zero_retention")
