"""Index users by the domain of their e-mail address, by which signing in finds them.

Revision ID: 0072
Revises: 0071
"""

from __future__ import annotations

from migrations.online import create_index, drop_index

revision = "0072"
down_revision = "0071"
branch_labels = None
depends_on = None


def upgrade() -> None:
    on = "users ((split_part(email, '@', 2)), org_id) WHERE archived_at IS NULL"
    create_index("users_live_domain", on)


def downgrade() -> None:
    drop_index("users_live_domain")
