"""Tables of the authorization server: clients, sessions, passkeys, consents, grants, codes.

Above: the modules beside it. Below: Postgres; migration 0008 makes what stands here. A client that
registered itself has no org; everything else has that of its user. What is secret stands hashed
(`peppers`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = sa.MetaData()


def _moment(name: str, *, nullable: bool = True) -> sa.Column[datetime]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=nullable)


def _text(name: str, *, nullable: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=nullable, primary_key=key)


def _texts(name: str) -> sa.Column[list[str]]:
    return sa.Column(name, ARRAY(sa.Text), nullable=False)


def _created_at() -> sa.Column[datetime]:
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column("created_at", kind, nullable=False, server_default=sa.func.now())


oauth_clients = sa.Table(
    "oauth_clients",
    metadata,
    _text("id", key=True),
    _text("org_id", nullable=True),
    _text("project_id", nullable=True),
    _text("service_account_id", nullable=True),
    _text("plan", nullable=True),
    _text("name"),
    _text("source"),
    _text("token_endpoint_auth_method"),
    _text("application_type"),
    _texts("redirect_uris"),
    _texts("grant_types"),
    _texts("scopes"),
    sa.Column("jwks", JSONB(none_as_null=True), nullable=True),
    _text("jwks_uri", nullable=True),
    sa.Column("dpop_bound", sa.Boolean, nullable=False),
    sa.Column("metadata", JSONB, nullable=False),
    _text("secret_hash", nullable=True),
    _text("older_secret_hash", nullable=True),
    _moment("older_secret_expires_at"),
    _text("registration_hash", nullable=True),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    _created_at(),
    _moment("archived_at"),
)

oauth_sessions = sa.Table(
    "oauth_sessions",
    metadata,
    _text("id", key=True),
    _text("org_id"),
    _text("user_id"),
    _text("token_hash"),
    _texts("amr"),
    _text("ip", nullable=True),
    _created_at(),
    _moment("auth_time", nullable=False),
    _moment("expires_at", nullable=False),
    _moment("ended_at"),
)

passkeys = sa.Table(
    "passkeys",
    metadata,
    _text("id", key=True),
    _text("org_id"),
    _text("user_id"),
    _text("credential_id"),
    sa.Column("public_key", sa.LargeBinary, nullable=False),
    sa.Column("sign_count", sa.BigInteger, nullable=False),
    _text("name"),
    _created_at(),
    _moment("last_used_at"),
    _moment("archived_at"),
)

oauth_consents = sa.Table(
    "oauth_consents",
    metadata,
    _text("org_id"),
    _text("user_id", key=True),
    _text("client_id", key=True),
    _text("redirect_uri", key=True),
    _text("resource", key=True),
    _texts("scopes"),
    _created_at(),
    _moment("updated_at", nullable=False),
    _moment("revoked_at"),
)

oauth_grants = sa.Table(
    "oauth_grants",
    metadata,
    _text("id", key=True),
    _text("org_id"),
    _text("user_id"),
    _text("client_id"),
    _text("project_id", nullable=True),
    _texts("resources"),
    _texts("scopes"),
    _created_at(),
    _moment("revoked_at"),
    _text("revoked_because", nullable=True),
)

oauth_codes = sa.Table(
    "oauth_codes",
    metadata,
    _text("code_hash", key=True),
    _text("org_id"),
    _text("grant_id"),
    _text("user_id"),
    _text("client_id"),
    _text("project_id", nullable=True),
    _text("redirect_uri"),
    _text("code_challenge"),
    _texts("resources"),
    _texts("scopes"),
    _text("nonce", nullable=True),
    _moment("auth_time", nullable=False),
    _texts("amr"),
    _text("dpop_jkt", nullable=True),
    _created_at(),
    _moment("expires_at", nullable=False),
    _moment("redeemed_at"),
)
