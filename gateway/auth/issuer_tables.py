"""Tables of external issuers, of who signed in from there, and of the answers to logins that were
used up.

Above: the modules beside it. Below: Postgres; migration 0010 makes what stands here.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = sa.MetaData()


def _text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _created_at() -> sa.Column[Any]:
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column("created_at", kind, nullable=False, server_default=sa.func.now())


issuers = sa.Table(
    "issuers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    _text("org_id"),
    _text("project_id"),
    _text("name"),
    _text("issuer"),
    _text("audience"),
    sa.Column("algorithms", ARRAY(sa.Text), nullable=False),
    sa.Column("required_claims", JSONB, nullable=False),
    _text("role_claim", nullable=True),
    sa.Column("roles", JSONB, nullable=False),
    _text("default_role", nullable=True),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
    _text("scope_claim", nullable=True),
    sa.Column("leeway_s", sa.Integer, nullable=False),
    _text("client_id", nullable=True),
    sa.Column("client_secret_sealed", sa.LargeBinary, nullable=True),
    _text("client_secret_id", nullable=True),
    sa.Column("provisions_users", sa.Boolean, nullable=False),
    _created_at(),
    sa.Column("archived_at", sa.TIMESTAMP(timezone=True), nullable=True),
)

external_identities = sa.Table(
    "external_identities",
    metadata,
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("issuer_id", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, nullable=False),
    _created_at(),
)
external_login_states = sa.Table(
    "external_login_states",
    metadata,
    sa.Column("state_hash", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
)
