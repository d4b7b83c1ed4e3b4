"""Tables of the authorization server: clients, sessions, passkeys, consents, grants, codes.

A client that registered itself has no org; everything else has that of its user. What is secret
stands hashed (`peppers`).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from gateway.columns import moment, moment_made, text, texts

metadata = sa.MetaData()

oauth_clients = sa.Table(
    "oauth_clients",
    metadata,
    text("id", key=True),
    text("org_id", nullable=True),
    text("project_id", nullable=True),
    text("service_account_id", nullable=True),
    text("plan", nullable=True),
    text("name"),
    text("source"),
    text("token_endpoint_auth_method"),
    text("application_type"),
    texts("redirect_uris"),
    texts("grant_types"),
    texts("scopes"),
    sa.Column("jwks", JSONB(none_as_null=True), nullable=True),
    text("jwks_uri", nullable=True),
    sa.Column("dpop_bound", sa.Boolean, nullable=False),
    sa.Column("metadata", JSONB, nullable=False),
    text("secret_hash", nullable=True),
    text("older_secret_hash", nullable=True),
    moment("older_secret_expires_at"),
    text("registration_hash", nullable=True),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    moment_made(),
    moment("archived_at"),
)

oauth_sessions = sa.Table(
    "oauth_sessions",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("user_id"),
    text("token_hash"),
    texts("amr"),
    text("ip", nullable=True),
    moment_made(),
    moment("auth_time", nullable=False),
    moment("expires_at", nullable=False),
    moment("ended_at"),
)

passkeys = sa.Table(
    "passkeys",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("user_id"),
    text("credential_id"),
    sa.Column("public_key", sa.LargeBinary, nullable=False),
    sa.Column("sign_count", sa.BigInteger, nullable=False),
    text("name"),
    moment_made(),
    moment("last_used_at"),
    moment("archived_at"),
)

oauth_consents = sa.Table(
    "oauth_consents",
    metadata,
    text("org_id"),
    text("user_id", key=True),
    text("client_id", key=True),
    text("redirect_uri", key=True),
    text("resource", key=True),
    texts("scopes"),
    moment_made(),
    moment("updated_at", nullable=False),
    moment("revoked_at"),
)

oauth_grants = sa.Table(
    "oauth_grants",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("user_id"),
    text("client_id"),
    text("project_id", nullable=True),
    texts("resources"),
    texts("scopes"),
    moment_made(),
    moment("revoked_at"),
    text("revoked_because", nullable=True),
)

oauth_codes = sa.Table(
    "oauth_codes",
    metadata,
    text("code_hash", key=True),
    text("org_id"),
    text("grant_id"),
    text("user_id"),
    text("client_id"),
    text("project_id", nullable=True),
    text("redirect_uri"),
    text("code_challenge"),
    texts("resources"),
    texts("scopes"),
    text("nonce", nullable=True),
    moment("auth_time", nullable=False),
    texts("amr"),
    text("dpop_jkt", nullable=True),
    moment_made(),
    moment("expires_at", nullable=False),
    moment("redeemed_at"),
)
