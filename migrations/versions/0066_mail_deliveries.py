"""Keep e-mails to people of an organization until they are sent, and which of them they want.

Revision ID: 0066
Revises: 0065
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column
from migrations.walls import open_wall, protect

revision = "0066"
down_revision = "0065"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE mail_deliveries (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        user_id text NOT NULL,
        event_id text NOT NULL,
        event_type text NOT NULL,
        body text NOT NULL,
        state text NOT NULL DEFAULT 'pending' CONSTRAINT mail_deliveries_state CHECK
            (state IN ('pending', 'delivered', 'dead')),
        attempts integer NOT NULL DEFAULT 0,
        due_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        leased_by text,
        leased_until timestamptz,
        status smallint,
        failure text,
        created_at timestamptz NOT NULL DEFAULT now(),
        ended_at timestamptz,
        CONSTRAINT mail_deliveries_once UNIQUE (user_id, event_id),
        CONSTRAINT mail_deliveries_user
            FOREIGN KEY (org_id, user_id) REFERENCES users (org_id, id)
    )
    """,
    "CREATE INDEX mail_deliveries_due ON mail_deliveries (due_at) WHERE state = 'pending'",
    "CREATE INDEX mail_deliveries_of ON mail_deliveries (org_id, id)",
    "CREATE INDEX mail_deliveries_age ON mail_deliveries (created_at)",
    "CREATE INDEX mail_deliveries_sent ON mail_deliveries (user_id, ended_at)"
    " WHERE state = 'delivered'",
)


def upgrade() -> None:
    add_column("users", "mail_choices", "jsonb", default="'{}'")
    for statement in STATEMENTS:
        op.execute(statement)
    protect("mail_deliveries", read_only=True, delete=True)


def downgrade() -> None:
    open_wall("mail_deliveries")
    op.execute("DROP TABLE mail_deliveries")
    op.execute("ALTER TABLE users DROP COLUMN mail_choices")
