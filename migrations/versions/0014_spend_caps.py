"""Spend caps: what an org, a project or a key may spend in a day, a month or in all.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

CAPS = """
    CREATE TABLE spend_caps (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        project_id text,
        key_id text,
        scope text NOT NULL GENERATED ALWAYS AS (CASE
            WHEN key_id IS NOT NULL THEN 'key'
            WHEN project_id IS NOT NULL THEN 'project'
            ELSE 'org'
        END) STORED,
        period text NOT NULL CONSTRAINT spend_caps_period
            CHECK (period IN ('day', 'month', 'total')),
        amount_pico numeric(38,0) NOT NULL CONSTRAINT spend_caps_amount CHECK (amount_pico >= 0),
        hard boolean NOT NULL,
        by_operator boolean NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        archived_at timestamptz,
        CONSTRAINT spend_caps_owner CHECK (num_nonnulls(project_id, key_id) <= 1),
        CONSTRAINT spend_caps_project FOREIGN KEY (org_id, project_id)
            REFERENCES projects (org_id, id),
        CONSTRAINT spend_caps_key FOREIGN KEY (org_id, key_id) REFERENCES api_keys (org_id, id)
    )
"""
# Of each kind one; that of the operator stands beside the tenant's own.
ONE_EACH = """
    CREATE UNIQUE INDEX spend_caps_live
        ON spend_caps (org_id, coalesce(key_id, project_id, ''), period, hard, by_operator)
        WHERE archived_at IS NULL
"""


def upgrade() -> None:
    op.execute("ALTER TABLE api_keys ADD CONSTRAINT api_keys_org_id_id UNIQUE (org_id, id)")
    op.execute(CAPS)
    op.execute(ONE_EACH)
    protect("spend_caps")


def downgrade() -> None:
    open_wall("spend_caps")
    op.execute("DROP TABLE spend_caps")
    op.execute("ALTER TABLE api_keys DROP CONSTRAINT api_keys_org_id_id")
