"""Whether answers say what they cost, without being asked: of an org, and of a key.

Revision ID: 0039
Revises: 0038
"""

from __future__ import annotations

from alembic import op

from migrations.walls import allow_update

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE orgs ADD COLUMN shows_cost boolean NOT NULL DEFAULT false")
    op.execute("ALTER TABLE api_keys ADD COLUMN shows_cost boolean")
    allow_update("orgs", "shows_cost")


def downgrade() -> None:
    op.execute("ALTER TABLE api_keys DROP COLUMN shows_cost")
    op.execute("ALTER TABLE orgs DROP COLUMN shows_cost")
