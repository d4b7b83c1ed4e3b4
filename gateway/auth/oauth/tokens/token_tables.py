"""Tables of issued tokens: refresh tokens, assertions seen, revocations, the keys that sign.

Nothing here can be used by who reads it: refresh tokens stand as HMACs, private keys encrypted, and
access tokens nowhere at all.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from gateway.columns import moment

metadata = sa.MetaData()

signing_keys = sa.Table(
    "signing_keys",
    metadata,
    sa.Column("kid", sa.Text, primary_key=True),
    sa.Column("public_jwk", JSONB, nullable=False),
    sa.Column("private_key", sa.LargeBinary, nullable=True),
    sa.Column("secret_id", sa.Text, nullable=False),
    moment("created_at", nullable=False),
    moment("activated_at"),
    moment("retired_at"),
    moment("verify_until"),
)

oauth_refresh_tokens = sa.Table(
    "oauth_refresh_tokens",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("grant_id", sa.Text, nullable=False),
    sa.Column("client_id", sa.Text, nullable=False),
    sa.Column("token_hash", sa.Text, nullable=False),
    sa.Column("parent_id", sa.Text, nullable=True),
    sa.Column("answer", JSONB, nullable=False),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
    sa.Column("resources", ARRAY(sa.Text), nullable=False),
    sa.Column("dpop_jkt", sa.Text, nullable=True),
    moment("created_at", nullable=False),
    moment("expires_at", nullable=False),
    moment("used_at"),
)

oauth_assertions = sa.Table(
    "oauth_assertions",
    metadata,
    sa.Column("client_id", sa.Text, primary_key=True),
    sa.Column("jti_hash", sa.Text, primary_key=True),
    moment("expires_at", nullable=False),
)

revocations = sa.Table(
    "revocations",
    metadata,
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("issued_until", sa.BigInteger, nullable=True),
    moment("expires_at", nullable=False),
)
