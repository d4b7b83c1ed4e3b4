"""API keys: what they are restricted to, their second secret while one replaces the other, when
they were used; models a project may use; origins of an org's web pages.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

from migrations.walls import allow_update

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

LIMITS = ("tokens_per_minute", "requests_per_minute", "max_concurrent_streams")


def upgrade() -> None:
    for column in ("models", "ip_ranges"):
        op.execute(f"ALTER TABLE api_keys ADD COLUMN {column} text[]")
        op.execute(
            f"ALTER TABLE api_keys ADD CONSTRAINT api_keys_{column}"
            f" CHECK (cardinality({column}) > 0)"
        )
    for column in LIMITS:
        op.execute(f"ALTER TABLE api_keys ADD COLUMN {column} bigint")
        op.execute(f"ALTER TABLE api_keys ADD CONSTRAINT api_keys_{column} CHECK ({column} >= 0)")
    op.execute(
        """
        ALTER TABLE api_keys
            ADD COLUMN last_used_at timestamptz,
            ADD COLUMN previous_hash text,
            ADD COLUMN previous_pepper_id text,
            ADD COLUMN previous_hint text,
            ADD COLUMN previous_expires_at timestamptz,
            ADD CONSTRAINT api_keys_previous CHECK (num_nulls(
                previous_hash, previous_pepper_id, previous_hint, previous_expires_at) IN (0, 4)),
            ADD CONSTRAINT api_keys_previous_hash UNIQUE (previous_hash, previous_pepper_id)
        """
    )
    op.execute(
        """
        ALTER TABLE projects
            ADD COLUMN models_mode text,
            ADD COLUMN models text[],
            ADD CONSTRAINT projects_models_mode CHECK (models_mode IN ('allow_list', 'deny_list')),
            ADD CONSTRAINT projects_models CHECK ((models_mode IS NULL) = (models IS NULL))
        """
    )
    op.execute("ALTER TABLE orgs ADD COLUMN cors_origins text[] NOT NULL DEFAULT '{}'")
    allow_update("orgs", "cors_origins")


def downgrade() -> None:
    op.execute("ALTER TABLE orgs DROP COLUMN cors_origins")
    op.execute("ALTER TABLE projects DROP COLUMN models_mode, DROP COLUMN models")
    for column in (
        *("models", "ip_ranges", *LIMITS, "last_used_at"),
        *("previous_hash", "previous_pepper_id", "previous_hint", "previous_expires_at"),
    ):
        op.execute(f"ALTER TABLE api_keys DROP COLUMN {column}")
