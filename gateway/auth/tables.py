"""Tables of authentication: clients, sessions, consents, grants, tokens, signing keys, issuers.

A client that registered itself has no org; everything else belongs to its user's org. Secrets are
stored as HMACs (`secret.Peppers`), private keys encrypted, and access tokens nowhere.
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

oauth_refresh_tokens = sa.Table(
    "oauth_refresh_tokens",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("grant_id"),
    text("client_id"),
    text("token_hash"),
    text("parent_id", nullable=True),
    sa.Column("answer", JSONB, nullable=False),
    texts("scopes"),
    texts("resources"),
    text("dpop_jkt", nullable=True),
    moment("created_at", nullable=False),
    moment("expires_at", nullable=False),
    moment("used_at"),
)

oauth_assertions = sa.Table(
    "oauth_assertions",
    metadata,
    text("client_id", key=True),
    text("jti_hash", key=True),
    moment("expires_at", nullable=False),
)

revocations = sa.Table(
    "revocations",
    metadata,
    sa.Column("seq", sa.BigInteger, primary_key=True),
    text("org_id"),
    text("kind"),
    text("subject"),
    sa.Column("issued_until", sa.BigInteger, nullable=True),
    moment("expires_at", nullable=False),
)

signing_keys = sa.Table(
    "signing_keys",
    metadata,
    text("kid", key=True),
    sa.Column("public_jwk", JSONB, nullable=False),
    sa.Column("private_key", sa.LargeBinary, nullable=True),
    text("secret_id"),
    moment("created_at", nullable=False),
    moment("activated_at"),
    moment("retired_at"),
    moment("verify_until"),
)

issuers = sa.Table(
    "issuers",
    metadata,
    text("id", key=True),
    text("org_id"),
    text("project_id"),
    text("name"),
    text("issuer"),
    text("audience"),
    texts("algorithms"),
    sa.Column("required_claims", JSONB, nullable=False),
    text("role_claim", nullable=True),
    sa.Column("roles", JSONB, nullable=False),
    text("default_role", nullable=True),
    texts("scopes"),
    text("scope_claim", nullable=True),
    sa.Column("leeway_s", sa.Integer, nullable=False),
    text("client_id", nullable=True),
    sa.Column("client_secret_sealed", sa.LargeBinary, nullable=True),
    text("client_secret_id", nullable=True),
    sa.Column("provisions_users", sa.Boolean, nullable=False),
    moment_made(),
    moment("archived_at"),
)

external_identities = sa.Table(
    "external_identities",
    metadata,
    text("org_id"),
    text("issuer_id", key=True),
    text("subject", key=True),
    text("user_id"),
    moment_made(),
)

external_login_states = sa.Table(
    "external_login_states",
    metadata,
    text("state_hash", key=True),
    text("org_id"),
    moment("expires_at", nullable=False),
)
