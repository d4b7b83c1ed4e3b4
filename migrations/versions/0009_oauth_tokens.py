"""Refresh tokens, signing keys, revocations.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect, share

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLES = ("oauth_refresh_tokens", "oauth_assertions", "revocations")


STATEMENTS = (
    """
    CREATE TABLE signing_keys (
        kid text PRIMARY KEY,
        public_jwk jsonb NOT NULL,
        private_key bytea,
        secret_id text NOT NULL,
        created_at timestamptz NOT NULL,
        activated_at timestamptz,
        retired_at timestamptz,
        verify_until timestamptz,
        CHECK ((retired_at IS NULL) = (verify_until IS NULL)),
        CHECK (private_key IS NOT NULL OR retired_at IS NOT NULL)
    )
    """,
    # At most one key signs, and at most one waits for its turn.
    "CREATE UNIQUE INDEX signing_keys_active ON signing_keys ((true))"
    " WHERE activated_at IS NOT NULL AND retired_at IS NULL",
    "CREATE UNIQUE INDEX signing_keys_next ON signing_keys ((true))"
    " WHERE activated_at IS NULL AND retired_at IS NULL",
    """
    CREATE TABLE oauth_refresh_tokens (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        grant_id text NOT NULL REFERENCES oauth_grants,
        client_id text NOT NULL,
        token_hash text NOT NULL,
        parent_id text UNIQUE REFERENCES oauth_refresh_tokens ON DELETE SET NULL,
        answer jsonb NOT NULL,
        scopes text[] NOT NULL,
        resources text[] NOT NULL,
        dpop_jkt text,
        created_at timestamptz NOT NULL,
        expires_at timestamptz NOT NULL,
        used_at timestamptz,
        UNIQUE (token_hash)
    )
    """,
    "CREATE INDEX oauth_refresh_tokens_grant ON oauth_refresh_tokens (grant_id)",
    """
    CREATE TABLE oauth_assertions (
        client_id text NOT NULL,
        jti_hash text NOT NULL,
        expires_at timestamptz NOT NULL,
        PRIMARY KEY (client_id, jti_hash)
    )
    """,
    "CREATE INDEX oauth_assertions_expiry ON oauth_assertions (expires_at)",
    # Numbers are drawn under a lock that is held until the commit (`auth.revocations`), so they
    # become visible in their order: who has read up to one has missed none below it.
    "CREATE SEQUENCE revocation_numbers",
    """
    CREATE TABLE revocations (
        seq bigint PRIMARY KEY DEFAULT nextval('revocation_numbers'),
        org_id text NOT NULL REFERENCES orgs,
        kind text NOT NULL CHECK (kind IN ('grant', 'token', 'client', 'user')),
        subject text NOT NULL,
        issued_until bigint,
        expires_at timestamptz NOT NULL
    )
    """,
    "CREATE INDEX revocations_expiry ON revocations (expires_at)",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    share("signing_keys", readable=False)
    protect("oauth_refresh_tokens", delete=True)
    share("oauth_assertions", readable=False, delete=True)
    protect("revocations", delete=True)
    op.execute("GRANT USAGE ON SEQUENCE revocation_numbers TO tollgate_app, tollgate_system")


def downgrade() -> None:
    for table in ("signing_keys", *TABLES):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP SEQUENCE revocation_numbers")
