"""Keep what upstreams of the MCP bridge want to be shown, sealed.

Revision ID: 0051
Revises: 0050
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE upstream_credentials (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        upstream text NOT NULL,
        user_id text,
        kind text NOT NULL,
        names text[] NOT NULL,
        sealed bytea NOT NULL,
        wrapped_key bytea NOT NULL,
        secret_id text NOT NULL,
        version bigint NOT NULL DEFAULT 1,
        expires_at timestamptz,
        refused_at timestamptz,
        created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT upstream_credentials_of_user
            FOREIGN KEY (org_id, user_id) REFERENCES users (org_id, id),
        CONSTRAINT upstream_credentials_kind CHECK (kind IN ('static', 'oauth'))
    )
    """,
    """
    CREATE UNIQUE INDEX upstream_credentials_once
        ON upstream_credentials (org_id, upstream, coalesce(user_id, ''))
    """,
    "CREATE INDEX upstream_credentials_by_secret ON upstream_credentials (secret_id)",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    protect("upstream_credentials", delete=True)


def downgrade() -> None:
    open_wall("upstream_credentials")
    op.execute("DROP TABLE upstream_credentials")
