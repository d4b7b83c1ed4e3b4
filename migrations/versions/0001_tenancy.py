"""Tenancy: plans, organizations, projects, API keys.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

LIVE = sa.text("archived_at IS NULL")


def moment(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=True)


def created_at() -> sa.Column[object]:
    return sa.Column(
        "created_at", sa.TIMESTAMP(timezone=True), nullable=False, server_default=sa.func.now()
    )


def plan() -> sa.Column[object]:
    return sa.Column("plan", sa.Text, sa.ForeignKey("plans.name"), nullable=True)


def limit(name: str) -> tuple[sa.Column[object], sa.CheckConstraint]:
    column: sa.Column[object] = sa.Column(name, sa.BigInteger, nullable=True)
    return column, sa.CheckConstraint(f"{name} >= 0", name=f"plans_{name}")


def named(table: str) -> sa.CheckConstraint:
    return sa.CheckConstraint("length(name) BETWEEN 1 AND 100", name=f"{table}_name")


def upgrade() -> None:
    op.create_table(
        "plans",
        sa.Column("name", sa.Text, primary_key=True),
        *limit("tokens_per_minute"),
        *limit("requests_per_minute"),
        *limit("max_concurrent_streams"),
        moment("archived_at"),
        named("plans"),
    )
    op.create_table(
        "orgs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        plan(),
        created_at(),
        moment("archived_at"),
        named("orgs"),
    )
    op.create_index("orgs_live_name", "orgs", ["name"], unique=True, postgresql_where=LIVE)
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        plan(),
        created_at(),
        moment("archived_at"),
        named("projects"),
    )
    op.create_index(
        "projects_live_name", "projects", ["org_id", "name"], unique=True, postgresql_where=LIVE
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("project_id", sa.Text, sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key_hash", sa.Text, nullable=False),
        sa.Column("pepper_id", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("last_four", sa.Text, nullable=False),
        sa.Column("scopes", ARRAY(sa.Text), nullable=False),
        plan(),
        created_at(),
        moment("expires_at"),
        moment("revoked_at"),
        named("api_keys"),
        sa.CheckConstraint("cardinality(scopes) > 0", name="api_keys_scopes"),
        sa.UniqueConstraint("key_hash", "pepper_id", name="api_keys_key_hash"),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])


def downgrade() -> None:
    for table in ("api_keys", "projects", "orgs", "plans"):
        op.drop_table(table)
