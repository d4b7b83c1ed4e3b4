"""OAuth clients, consents, sessions, passkeys, grants and codes.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from migrations.walls import open_wall, protect

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NOTHING = sa.text("'{}'")
TABLES = {
    "oauth_codes": True,
    "oauth_grants": False,
    "oauth_consents": False,
    "oauth_sessions": True,
    "passkeys": False,
    "oauth_clients": False,
}
"""Whether rows may be deleted: codes and sessions that are over, once nobody can ask for them."""

OF_USERS = ("oauth_sessions", "passkeys", "oauth_consents", "oauth_grants", "oauth_codes")
OF_PROJECTS = ("oauth_clients", "oauth_grants", "oauth_codes")


def moment(name: str, *, nullable: bool = True) -> sa.Column[Any]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=nullable)


def created_at() -> sa.Column[Any]:
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column("created_at", kind, nullable=False, server_default=sa.func.now())


def org(*, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=nullable)


def user() -> sa.Column[Any]:
    return sa.Column("user_id", sa.Text, nullable=False)


def project() -> sa.Column[Any]:
    return sa.Column("project_id", sa.Text, nullable=True)


def texts(name: str) -> sa.Column[Any]:
    return sa.Column(name, ARRAY(sa.Text), nullable=False, server_default=NOTHING)


def text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=nullable)


def upgrade() -> None:
    create_clients()
    create_sessions()
    create_grants()
    for table in OF_USERS:
        refer(table, "user_id", "users")
    for table in OF_PROJECTS:
        refer(table, "project_id", "projects")
    refer("oauth_clients", "service_account_id", "service_accounts")
    for table, delete in TABLES.items():
        protect(table, delete=delete)


def refer(table: str, column: str, other: str) -> None:
    """The org too, so that no row can point across the wall."""
    op.create_foreign_key(f"{table}_{column}", table, other, ["org_id", column], ["org_id", "id"])


def create_clients() -> None:
    op.create_table(
        "oauth_clients",
        sa.Column("id", sa.Text, primary_key=True),
        org(nullable=True),
        project(),
        text("service_account_id", nullable=True),
        text("name"),
        text("source"),
        text("token_endpoint_auth_method"),
        text("application_type"),
        texts("redirect_uris"),
        texts("grant_types"),
        texts("scopes"),
        sa.Column("jwks", JSONB, nullable=True),
        text("jwks_uri", nullable=True),
        sa.Column("dpop_bound", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("metadata", JSONB, nullable=False, server_default=NOTHING),
        text("secret_hash", nullable=True),
        text("older_secret_hash", nullable=True),
        moment("older_secret_expires_at"),
        text("registration_hash", nullable=True),
        sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
        created_at(),
        moment("archived_at"),
        sa.CheckConstraint("length(name) BETWEEN 1 AND 100", name="oauth_clients_name"),
        sa.CheckConstraint("source IN ('admin', 'dynamic')", name="oauth_clients_source"),
        sa.CheckConstraint("source <> 'admin' OR org_id IS NOT NULL", name="oauth_clients_owner"),
        sa.CheckConstraint("jwks IS NULL OR jwks_uri IS NULL", name="oauth_clients_keys"),
    )
    op.create_index("oauth_clients_org", "oauth_clients", ["org_id", "id"])


def create_sessions() -> None:
    op.create_table(
        "oauth_sessions",
        sa.Column("id", sa.Text, primary_key=True),
        org(),
        user(),
        text("token_hash"),
        texts("amr"),
        text("ip", nullable=True),
        created_at(),
        moment("auth_time", nullable=False),
        moment("expires_at", nullable=False),
        moment("ended_at"),
        sa.UniqueConstraint("token_hash", name="oauth_sessions_token"),
    )
    op.create_index("oauth_sessions_user", "oauth_sessions", ["user_id"])
    op.create_index("oauth_sessions_expiry", "oauth_sessions", ["expires_at"])
    op.create_table(
        "passkeys",
        sa.Column("id", sa.Text, primary_key=True),
        org(),
        user(),
        text("credential_id"),
        sa.Column("public_key", sa.LargeBinary, nullable=False),
        sa.Column("sign_count", sa.BigInteger, nullable=False),
        text("name"),
        created_at(),
        moment("last_used_at"),
        moment("archived_at"),
        sa.UniqueConstraint("credential_id", name="passkeys_credential"),
        sa.CheckConstraint("length(name) BETWEEN 1 AND 100", name="passkeys_name"),
    )
    op.create_index("passkeys_user", "passkeys", ["user_id"])


def create_grants() -> None:
    op.create_table(
        "oauth_consents",
        org(),
        sa.Column("user_id", sa.Text, primary_key=True),
        sa.Column("client_id", sa.Text, primary_key=True),
        sa.Column("redirect_uri", sa.Text, primary_key=True),
        sa.Column("resource", sa.Text, primary_key=True),
        texts("scopes"),
        created_at(),
        moment("updated_at", nullable=False),
        moment("revoked_at"),
    )
    op.create_table(
        "oauth_grants",
        sa.Column("id", sa.Text, primary_key=True),
        org(),
        user(),
        text("client_id"),
        project(),
        texts("resources"),
        texts("scopes"),
        created_at(),
        moment("revoked_at"),
        text("revoked_because", nullable=True),
    )
    op.create_index("oauth_grants_org", "oauth_grants", ["org_id", "id"])
    op.create_index("oauth_grants_user", "oauth_grants", ["user_id", "client_id"])
    op.create_table(
        "oauth_codes",
        sa.Column("code_hash", sa.Text, primary_key=True),
        org(),
        sa.Column("grant_id", sa.Text, sa.ForeignKey("oauth_grants.id"), nullable=False),
        user(),
        text("client_id"),
        project(),
        text("redirect_uri"),
        text("code_challenge"),
        texts("resources"),
        texts("scopes"),
        text("nonce", nullable=True),
        moment("auth_time", nullable=False),
        texts("amr"),
        text("dpop_jkt", nullable=True),
        created_at(),
        moment("expires_at", nullable=False),
        moment("redeemed_at"),
    )
    op.create_index("oauth_codes_expiry", "oauth_codes", ["expires_at"])


def downgrade() -> None:
    for table in TABLES:
        open_wall(table)
        op.drop_table(table)
