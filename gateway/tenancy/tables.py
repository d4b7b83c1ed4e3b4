"""Tables of tenancy: plans, org > project > key, and what each may spend. Rows are archived or
revoked, never deleted.

Ids are text, a kind and a UUIDv7 (`org_...`): they sort by age, and bills may name them for ever.
"""

from __future__ import annotations

import unicodedata

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.columns import limits, moment, moment_made
from gateway.principal import KEY_LIMIT_NAMES, LIMIT_NAMES
from gateway.tenancy.errors import InvalidField, NotFound

MAX_NAME_LENGTH = 100

metadata = sa.MetaData()


def _plan() -> sa.Column[str]:
    return sa.Column("plan", sa.Text, sa.ForeignKey("plans.name"), nullable=True)


plans = sa.Table(
    "plans",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    *limits(LIMIT_NAMES),
    sa.Column("weight", sa.Double, nullable=True),
    sa.Column("lane", sa.Text, nullable=True),
    sa.Column("price_list", sa.Text, nullable=True),
    sa.Column("in_settings", sa.Boolean, nullable=False, server_default=sa.true()),
    moment_made(),
    moment("archived_at"),
)

orgs = sa.Table(
    "orgs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    _plan(),
    sa.Column("is_operator", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("cors_origins", ARRAY(sa.Text), nullable=False, server_default="{}"),
    sa.Column("prepaid", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("shows_cost", sa.Boolean, nullable=False, server_default=sa.false()),
    moment_made(),
    moment("archived_at"),
    moment("suspension_lifted_at"),
    sa.Index(
        "orgs_live_name", "name", unique=True, postgresql_where=sa.text("archived_at IS NULL")
    ),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    _plan(),
    sa.Column("models_mode", sa.Text, nullable=True),
    sa.Column("models", ARRAY(sa.Text), nullable=True),
    sa.Column("zero_retention", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("store_content", sa.Boolean, nullable=False, server_default=sa.false()),
    moment_made(),
    moment("archived_at"),
    sa.UniqueConstraint("org_id", "id", name="projects_org_id_id"),
    sa.Index(
        "projects_live_name",
        "org_id",
        "name",
        unique=True,
        postgresql_where=sa.text("archived_at IS NULL"),
    ),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
    sa.Column("project_id", sa.Text, nullable=True, index=True),
    sa.Column("user_id", sa.Text, nullable=True, index=True),
    sa.Column("service_account_id", sa.Text, nullable=True, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("key_hash", sa.Text, nullable=False),
    sa.Column("pepper_id", sa.Text, nullable=False),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("last_four", sa.Text, nullable=False),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
    _plan(),
    sa.Column("models", ARRAY(sa.Text), nullable=True),
    sa.Column("ip_ranges", ARRAY(sa.Text), nullable=True),
    *limits(KEY_LIMIT_NAMES),
    sa.Column("lane", sa.Text, nullable=True),
    sa.Column("model_limits", JSONB(none_as_null=True), nullable=True),
    sa.Column("shows_cost", sa.Boolean, nullable=True),
    sa.Column("for_console", sa.Boolean, nullable=False, server_default=sa.false()),
    moment_made(),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),
    # The secret before this one, while both are good.
    sa.Column("previous_hash", sa.Text, nullable=True),
    sa.Column("previous_pepper_id", sa.Text, nullable=True),
    sa.Column("previous_hint", sa.Text, nullable=True),
    moment("previous_expires_at"),
    # Of a user or of a service account, or of neither.
    sa.ForeignKeyConstraint(
        ["org_id", "user_id"], ["users.org_id", "users.id"], name="api_keys_user"
    ),
    sa.ForeignKeyConstraint(
        ["org_id", "service_account_id"],
        ["service_accounts.org_id", "service_accounts.id"],
        name="api_keys_service_account",
    ),
    sa.UniqueConstraint("key_hash", "pepper_id", name="api_keys_key_hash"),
    sa.ForeignKeyConstraint(
        ["org_id", "project_id"], ["projects.org_id", "projects.id"], name="api_keys_of_project"
    ),
    sa.UniqueConstraint("previous_hash", "previous_pepper_id", name="api_keys_previous_hash"),
    sa.UniqueConstraint("org_id", "id", name="api_keys_org_id_id"),
    sa.Index(
        "api_keys_for_console",
        "project_id",
        "user_id",
        unique=True,
        postgresql_where=sa.text("for_console"),
    ),
)

spend_caps = sa.Table(
    "spend_caps",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), nullable=False),
    sa.Column("project_id", sa.Text, nullable=True),
    sa.Column("key_id", sa.Text, nullable=True),
    sa.Column("model", sa.Text, nullable=True),
    sa.Column("tag", sa.Text, nullable=True),
    sa.Column("scope", sa.Text, sa.FetchedValue(), nullable=False),
    sa.Column("period", sa.Text, nullable=False),
    sa.Column("amount_pico", sa.Numeric(38, 0), nullable=False),
    sa.Column("hard", sa.Boolean, nullable=False),
    sa.Column("by_operator", sa.Boolean, nullable=False),
    moment_made(),
    moment("archived_at"),
    sa.ForeignKeyConstraint(
        ["org_id", "project_id"], ["projects.org_id", "projects.id"], name="spend_caps_project"
    ),
    sa.ForeignKeyConstraint(
        ["org_id", "key_id"], ["api_keys.org_id", "api_keys.id"], name="spend_caps_key"
    ),
    sa.Index(
        "spend_caps_live",
        "org_id",
        sa.text("(coalesce(key_id, project_id, 'model/' || model, 'tag/' || tag, ''))"),
        "period",
        "hard",
        "by_operator",
        unique=True,
        postgresql_where=sa.text("archived_at IS NULL"),
    ),
)

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    sa.Column("org_id", sa.Text, sa.ForeignKey("orgs.id"), primary_key=True),
    sa.Column("principal", sa.Text, primary_key=True),
    sa.Column("key_digest", sa.LargeBinary, primary_key=True),
    sa.Column("request_digest", sa.LargeBinary, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column(
        "claimed_at",
        sa.TIMESTAMP(timezone=True),
        nullable=False,
        server_default=sa.func.now(),
        index=True,
    ),
    sa.Column("status", sa.SmallInteger, nullable=True),
    sa.Column("response", sa.LargeBinary, nullable=True),
    sa.Column("secret_id", sa.Text, nullable=True),
)


def check_name(name: str) -> str:
    """Return `name` as it is stored: 1 to 100 printable characters without space around them.

    Raises: InvalidField.
    """
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidField("name", f"must have 1 to {MAX_NAME_LENGTH} characters")
    if name != name.strip() or any(unicodedata.category(c)[0] == "C" for c in name):
        raise InvalidField("name", "must be printable and not begin or end with a space")
    return name


async def check_plan(conn: AsyncConnection, plan: str | None) -> str | None:
    """Raises: NotFound when `plan` names no live plan."""
    if plan is None:
        return None
    live = sa.select(plans.c.name).where(plans.c.name == plan, plans.c.archived_at.is_(None))
    if await conn.scalar(live) is None:
        raise NotFound("plan", f"no plan {plan!r}")
    return plan
