"""Members: users, who is in which project, service accounts, invites; whose an API key is; a
project's own rate limits of a model.

A reference inside an org names the org too, so that no row can point across the wall.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ROLES = "'owner', 'admin', 'developer', 'billing', 'reader'"
PROJECT_ROLES = "'owner', 'member'"
NAMED = "CHECK (length(name) BETWEEN 1 AND 100)"
EMAIL = "CHECK (length(email) BETWEEN 3 AND 254)"

TABLES = (
    f"""
    CREATE TABLE users (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        email text NOT NULL CONSTRAINT users_email {EMAIL},
        name text NOT NULL CONSTRAINT users_name {NAMED},
        role text NOT NULL CONSTRAINT users_role CHECK (role IN ({ROLES})),
        password_hash text,
        created_at timestamptz NOT NULL DEFAULT now(),
        archived_at timestamptz,
        CONSTRAINT users_org_id_id UNIQUE (org_id, id)
    )
    """,
    "CREATE UNIQUE INDEX users_live_email ON users (org_id, email) WHERE archived_at IS NULL",
    f"""
    CREATE TABLE project_members (
        org_id text NOT NULL,
        project_id text NOT NULL,
        user_id text NOT NULL,
        role text NOT NULL CONSTRAINT project_members_role CHECK (role IN ({PROJECT_ROLES})),
        added_at timestamptz NOT NULL DEFAULT now(),
        removed_at timestamptz,
        PRIMARY KEY (project_id, user_id),
        CONSTRAINT project_members_project FOREIGN KEY (org_id, project_id)
            REFERENCES projects (org_id, id),
        CONSTRAINT project_members_user FOREIGN KEY (org_id, user_id) REFERENCES users (org_id, id)
    )
    """,
    "CREATE INDEX project_members_user_id ON project_members (user_id)",
    f"""
    CREATE TABLE service_accounts (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        project_id text NOT NULL,
        name text NOT NULL CONSTRAINT service_accounts_name {NAMED},
        role text NOT NULL CONSTRAINT service_accounts_role CHECK (role IN ({ROLES})),
        project_role text NOT NULL CONSTRAINT service_accounts_project_role
            CHECK (project_role IN ({PROJECT_ROLES}, 'none')),
        created_at timestamptz NOT NULL DEFAULT now(),
        archived_at timestamptz,
        CONSTRAINT service_accounts_org_id_id UNIQUE (org_id, id),
        CONSTRAINT service_accounts_project FOREIGN KEY (org_id, project_id)
            REFERENCES projects (org_id, id)
    )
    """,
    "CREATE INDEX service_accounts_project_id ON service_accounts (project_id)",
    f"""
    CREATE TABLE invites (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        email text NOT NULL CONSTRAINT invites_email {EMAIL},
        role text NOT NULL CONSTRAINT invites_role CHECK (role IN ({ROLES})),
        projects jsonb NOT NULL,
        token_hash text NOT NULL CONSTRAINT invites_token_hash UNIQUE,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        accepted_at timestamptz,
        accepted_by text,
        archived_at timestamptz,
        CONSTRAINT invites_accepted_by FOREIGN KEY (org_id, accepted_by)
            REFERENCES users (org_id, id)
    )
    """,
    """
    CREATE UNIQUE INDEX invites_open_email ON invites (org_id, email)
        WHERE accepted_at IS NULL AND archived_at IS NULL
    """,
    """
    CREATE TABLE project_rate_limits (
        org_id text NOT NULL,
        project_id text NOT NULL,
        model text NOT NULL CONSTRAINT project_rate_limits_model
            CHECK (length(model) BETWEEN 1 AND 512),
        tokens_per_minute bigint CONSTRAINT project_rate_limits_tokens_per_minute
            CHECK (tokens_per_minute >= 0),
        requests_per_minute bigint CONSTRAINT project_rate_limits_requests_per_minute
            CHECK (requests_per_minute >= 0),
        PRIMARY KEY (project_id, model),
        CONSTRAINT project_rate_limits_project FOREIGN KEY (org_id, project_id)
            REFERENCES projects (org_id, id)
    )
    """,
)
WALLED = ("users", "project_members", "service_accounts", "invites", "project_rate_limits")
OWNED_KEYS = (
    "ALTER TABLE api_keys ADD COLUMN user_id text, ADD COLUMN service_account_id text",
    """
    ALTER TABLE api_keys
        ADD CONSTRAINT api_keys_user FOREIGN KEY (org_id, user_id) REFERENCES users (org_id, id),
        ADD CONSTRAINT api_keys_service_account FOREIGN KEY (org_id, service_account_id)
            REFERENCES service_accounts (org_id, id),
        ADD CONSTRAINT api_keys_one_owner CHECK (num_nonnulls(user_id, service_account_id) <= 1)
    """,
    "CREATE INDEX ix_api_keys_user_id ON api_keys (user_id)",
    "CREATE INDEX ix_api_keys_service_account_id ON api_keys (service_account_id)",
    # A key of administration belongs to the org: archiving a project must not lock its org out.
    "ALTER TABLE api_keys ALTER COLUMN project_id DROP NOT NULL",
    """
    ALTER TABLE api_keys ADD CONSTRAINT api_keys_project
        CHECK (project_id IS NOT NULL OR prefix = 'sk-tg-admin-')
    """,
)


def upgrade() -> None:
    for statement in (*TABLES, *OWNED_KEYS):
        op.execute(statement)
    for table in WALLED:
        protect(table)


def downgrade() -> None:
    """Raises: NotNullViolation where a key belongs to no project."""
    for constraint in ("project", "one_owner", "service_account", "user"):
        op.execute(f"ALTER TABLE api_keys DROP CONSTRAINT api_keys_{constraint}")
    op.execute("ALTER TABLE api_keys ALTER COLUMN project_id SET NOT NULL")
    op.execute("ALTER TABLE api_keys DROP COLUMN user_id, DROP COLUMN service_account_id")
    for table in reversed(WALLED):
        open_wall(table)
        op.execute(f"DROP TABLE {table} CASCADE")
