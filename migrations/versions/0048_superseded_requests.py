"""Requests whose answer was lost with their gateway, and which were made once more.

Revision ID: 0048
Revises: 0047
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE superseded_requests (
            request_id text PRIMARY KEY,
            org_id text NOT NULL REFERENCES orgs,
            superseded_by text NOT NULL,
            claimed_at timestamptz NOT NULL,
            superseded_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute("CREATE INDEX superseded_requests_age ON superseded_requests (superseded_at)")
    protect("superseded_requests")


def downgrade() -> None:
    open_wall("superseded_requests")
    op.execute("DROP TABLE superseded_requests")
