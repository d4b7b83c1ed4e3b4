"""Tables of external issuers, of who signed in from there, and of the answers to logins that were
used up.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from gateway.columns import moment, moment_made, text

metadata = sa.MetaData()

issuers = sa.Table(
    "issuers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    text("org_id"),
    text("project_id"),
    text("name"),
    text("issuer"),
    text("audience"),
    sa.Column("algorithms", ARRAY(sa.Text), nullable=False),
    sa.Column("required_claims", JSONB, nullable=False),
    text("role_claim", nullable=True),
    sa.Column("roles", JSONB, nullable=False),
    text("default_role", nullable=True),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
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
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("issuer_id", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, nullable=False),
    moment_made(),
)
external_login_states = sa.Table(
    "external_login_states",
    metadata,
    sa.Column("state_hash", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    moment("expires_at", nullable=False),
)
