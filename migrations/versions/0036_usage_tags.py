"""Tags of requests: of each event that has some, their days, and soft caps of what one may cost.

Revision ID: 0036
Revises: 0035
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

TABLES = ("event_tags", "usage_tags", "usage_tags_daily")


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE event_tags (
            event_id text PRIMARY KEY,
            org text NOT NULL,
            tags jsonb NOT NULL
        )
        """
    )
    op.execute(
        "CREATE TRIGGER event_tags_immutable BEFORE UPDATE OR DELETE ON event_tags"
        " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
    )
    op.execute(
        """
        CREATE TABLE usage_tags (
            org text NOT NULL,
            day timestamptz NOT NULL,
            tag text NOT NULL,
            value text NOT NULL,
            PRIMARY KEY (org, day, tag, value)
        )
        """
    )
    op.execute(
        "CREATE TABLE usage_tags_daily (LIKE usage_daily INCLUDING DEFAULTS) WITH (fillfactor = 50)"
    )
    op.execute(
        "ALTER TABLE usage_tags_daily ADD COLUMN tag text NOT NULL, ADD COLUMN value text NOT NULL,"
        " ADD PRIMARY KEY (org, tag, day, value, project, key, model, tier, batch)"
    )
    for table in TABLES:
        protect(table, "org", read_only=True)
    op.execute(
        "ALTER TABLE spend_caps ADD COLUMN tag text,"
        " ADD CONSTRAINT spend_caps_tag CHECK (tag IS NULL OR NOT hard)"
    )
    told_apart_by(
        owners="project_id, key_id, model, tag",
        owner="coalesce(key_id, project_id, 'model/' || model, 'tag/' || tag, '')",
        scopes="WHEN model IS NOT NULL THEN 'model' WHEN tag IS NOT NULL THEN 'tag'",
    )


def downgrade() -> None:
    op.execute("DELETE FROM spend_caps WHERE tag IS NOT NULL")
    told_apart_by(
        owners="project_id, key_id, model",
        owner="coalesce(key_id, project_id, 'model/' || model, '')",
        scopes="WHEN model IS NOT NULL THEN 'model'",
    )
    op.execute("ALTER TABLE spend_caps DROP COLUMN tag")
    for table in TABLES:
        open_wall(table)
        op.execute(f"DROP TABLE {table}")


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
