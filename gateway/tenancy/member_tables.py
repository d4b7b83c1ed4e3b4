"""Tables of who belongs to an org: users, members of projects, service accounts, invites; and a
project's own rate limits. Rows are archived or removed by a moment, never deleted.

A reference inside an org names the org too: no row can point across the wall.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Literal, get_args

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from gateway.columns import limits, moment, moment_made
from gateway.principal import PROJECT_LIMITS, Role
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.tables import metadata

ProjectRole = Literal["owner", "member"]

ROLES: tuple[str, ...] = get_args(Role)
PROJECT_ROLES: tuple[str, ...] = get_args(ProjectRole)
MAX_EMAIL_LENGTH = 254
"""RFC 5321, 4.5.3.1.3, less the angle brackets."""


def _org() -> sa.Column[str]:
    return sa.Column("org_id", sa.Text, nullable=False)


def _same_org(column: str, table: str, name: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["org_id", column], [f"{table}.org_id", f"{table}.id"], name=name
    )


def domain_of(email: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return the domain of an e-mail address, as `users_live_domain` has it."""
    return sa.func.split_part(email, sa.literal_column("'@'"), sa.literal_column("2"))


users = sa.Table(
    "users",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
    sa.Column("email", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("password_hash", sa.Text, nullable=True),
    sa.Column("mail_choices", JSONB, nullable=False, server_default="{}"),
    moment_made(),
    moment("archived_at"),
    sa.UniqueConstraint("org_id", "id", name="users_org_id_id"),
    sa.Index(
        "users_live_email",
        "org_id",
        "email",
        unique=True,
        postgresql_where=sa.text("archived_at IS NULL"),
    ),
    sa.Index(
        "users_live_domain",
        sa.text("split_part(email, '@', 2)"),
        "org_id",
        postgresql_where=sa.text("archived_at IS NULL"),
    ),
)

project_members = sa.Table(
    "project_members",
    metadata,
    _org(),
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, primary_key=True),
    sa.Column("role", sa.Text, nullable=False),
    moment_made("added_at"),
    moment("removed_at"),
    _same_org("project_id", "projects", "project_members_project"),
    _same_org("user_id", "users", "project_members_user"),
    sa.Index("project_members_user_id", "user_id"),
)

service_accounts = sa.Table(
    "service_accounts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    _org(),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("project_role", sa.Text, nullable=False),
    moment_made(),
    moment("archived_at"),
    sa.UniqueConstraint("org_id", "id", name="service_accounts_org_id_id"),
    _same_org("project_id", "projects", "service_accounts_project"),
    sa.Index("service_accounts_project_id", "project_id"),
)

invites = sa.Table(
    "invites",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
    sa.Column("email", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("projects", JSONB, nullable=False),
    sa.Column("token_hash", sa.Text, nullable=False),
    moment_made(),
    moment("expires_at", nullable=False),
    moment("accepted_at"),
    sa.Column("accepted_by", sa.Text, nullable=True),
    moment("archived_at"),
    sa.UniqueConstraint("token_hash", name="invites_token_hash"),
    _same_org("accepted_by", "users", "invites_accepted_by"),
    sa.Index(
        "invites_open_email",
        "org_id",
        "email",
        unique=True,
        postgresql_where=sa.text("accepted_at IS NULL AND archived_at IS NULL"),
    ),
)

project_rate_limits = sa.Table(
    "project_rate_limits",
    metadata,
    _org(),
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    *limits(PROJECT_LIMITS),
    _same_org("project_id", "projects", "project_rate_limits_project"),
)


def check_email(email: str) -> str:
    """Return `email` as it is stored: lower case, so that a person is found however they write it.

    Raises: InvalidField.
    """
    known = unicodedata.normalize("NFC", email).lower()
    local, at, domain = known.rpartition("@")
    if not (at and local and domain and 3 <= len(known) <= MAX_EMAIL_LENGTH):
        raise InvalidField("email", "must be an e-mail address")
    if any(c.isspace() or unicodedata.category(c)[0] == "C" for c in known) or "@" in local:
        raise InvalidField("email", "must be an e-mail address")
    return known


def check_role(role: str, known: Iterable[str] = ROLES) -> str:
    """Raises: InvalidField."""
    if role not in known:
        raise InvalidField("role", f"must be one of {', '.join(known)}")
    return role
