"""Soft caps of a model: what an org wants to be told of, over all its projects and keys.

Revision ID: 0031
Revises: 0030
"""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE spend_caps ADD COLUMN model text,"
        " ADD CONSTRAINT spend_caps_model CHECK (model IS NULL OR NOT hard)"
    )
    told_apart_by(
        owners="project_id, key_id, model",
        owner="coalesce(key_id, project_id, 'model/' || model, '')",
        scopes="WHEN model IS NOT NULL THEN 'model'",
    )


def downgrade() -> None:
    op.execute("DELETE FROM spend_caps WHERE model IS NOT NULL")
    told_apart_by(owners="project_id, key_id", owner="coalesce(key_id, project_id, '')", scopes="")
    op.execute("ALTER TABLE spend_caps DROP COLUMN model")


def told_apart_by(*, owners: str, owner: str, scopes: str) -> None:
    """A generated column has no other way to change in all versions of Postgres."""
    op.execute(
        f"""
        ALTER TABLE spend_caps
            DROP CONSTRAINT spend_caps_owner,
            ADD CONSTRAINT spend_caps_owner CHECK (num_nonnulls({owners}) <= 1),
            DROP COLUMN scope,
            ADD COLUMN scope text NOT NULL GENERATED ALWAYS AS (CASE
                WHEN key_id IS NOT NULL THEN 'key'
                WHEN project_id IS NOT NULL THEN 'project'
                {scopes}
                ELSE 'org'
            END) STORED
        """
    )
    op.execute("DROP INDEX spend_caps_live")
    op.execute(
        "CREATE UNIQUE INDEX spend_caps_live"
        f" ON spend_caps (org_id, ({owner}), period, hard, by_operator)"
        " WHERE archived_at IS NULL"
    )
