"""External issuers: whose tokens and logins a tenant believes; who logged in from there; which
answers to logins have been used.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

ISSUERS = """
    CREATE TABLE issuers (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        project_id text NOT NULL,
        name text NOT NULL CONSTRAINT issuers_name CHECK (length(name) BETWEEN 1 AND 100),
        issuer text NOT NULL CONSTRAINT issuers_issuer CHECK (length(issuer) BETWEEN 1 AND 2048),
        audience text NOT NULL
            CONSTRAINT issuers_audience CHECK (length(audience) BETWEEN 1 AND 512),
        algorithms text[] NOT NULL
            CONSTRAINT issuers_algorithms CHECK (cardinality(algorithms) > 0),
        required_claims jsonb NOT NULL,
        role_claim text,
        roles jsonb NOT NULL,
        default_role text,
        scopes text[] NOT NULL CONSTRAINT issuers_scopes CHECK (cardinality(scopes) > 0),
        scope_claim text,
        leeway_s integer NOT NULL CONSTRAINT issuers_leeway CHECK (leeway_s BETWEEN 0 AND 120),
        client_id text,
        client_secret_sealed bytea,
        client_secret_id text,
        provisions_users boolean NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        archived_at timestamptz,
        CONSTRAINT issuers_org_id_id UNIQUE (org_id, id),
        CONSTRAINT issuers_project FOREIGN KEY (org_id, project_id)
            REFERENCES projects (org_id, id),
        CONSTRAINT issuers_client_secret
            CHECK (num_nonnulls(client_secret_sealed, client_secret_id) IN (0, 2)
                   AND (client_secret_sealed IS NULL OR client_id IS NOT NULL))
    )
"""
# One audience of an issuer means one tenant: a token never has to choose between two.
MEANS_ONE = """
    CREATE UNIQUE INDEX issuers_live_audience ON issuers (issuer, audience)
        WHERE archived_at IS NULL
"""
IDENTITIES = """
    CREATE TABLE external_identities (
        org_id text NOT NULL,
        issuer_id text NOT NULL,
        subject text NOT NULL
            CONSTRAINT external_identities_subject CHECK (length(subject) BETWEEN 1 AND 255),
        user_id text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (issuer_id, subject),
        CONSTRAINT external_identities_issuer FOREIGN KEY (org_id, issuer_id)
            REFERENCES issuers (org_id, id),
        CONSTRAINT external_identities_user FOREIGN KEY (org_id, user_id)
            REFERENCES users (org_id, id)
    )
"""
USED_STATES = """
    CREATE TABLE external_login_states (
        state_hash text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        expires_at timestamptz NOT NULL
    )
"""


def upgrade() -> None:
    for statement in (ISSUERS, MEANS_ONE, IDENTITIES, USED_STATES):
        op.execute(statement)
    op.execute("CREATE INDEX ix_issuers_org_id ON issuers (org_id)")
    op.execute("CREATE INDEX ix_external_identities_user_id ON external_identities (user_id)")
    op.execute("CREATE INDEX ix_external_login_states ON external_login_states (expires_at)")
    protect("issuers")
    protect("external_identities")
    protect("external_login_states", delete=True)


def downgrade() -> None:
    for table in ("external_login_states", "external_identities", "issuers"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
