"""Keep what responses in the background stream, for those who come back for it.

Revision ID: 0053
Revises: 0052
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0053"
down_revision = "0052"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE response_events (
        response_id text NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        first_number bigint NOT NULL,
        org_id text NOT NULL,
        last_number bigint NOT NULL,
        content bytea NOT NULL,
        secret_id text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (response_id, first_number)
    )
    """,
    "CREATE INDEX response_events_old ON response_events (created_at)",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    protect("response_events", delete=True)


def downgrade() -> None:
    open_wall("response_events")
    op.execute("DROP TABLE response_events")
