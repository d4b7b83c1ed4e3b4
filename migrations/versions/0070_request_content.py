"""Keep the texts of requests of projects that want it, a partition a day.

Partitions are made and dropped as those of the log are. Texts are packed before they are sealed, so
Postgres does not try to.

Revision ID: 0070
Revises: 0069
"""

from __future__ import annotations

from alembic import op

from migrations.online import add_column
from migrations.walls import ROLE_SYSTEM, open_wall, protect

revision = "0070"
down_revision = "0069"
branch_labels = None
depends_on = None

CONTENT = """
    CREATE TABLE IF NOT EXISTS request_content (
        org text NOT NULL,
        at timestamptz NOT NULL,
        id uuid NOT NULL,
        project text NOT NULL,
        content bytea NOT NULL,
        secret_id text NOT NULL,
        PRIMARY KEY (org, at, id)
    ) PARTITION BY RANGE (at)
"""
INDEX = """
    CREATE INDEX IF NOT EXISTS request_content_project ON request_content (org, project)
"""
KEEP = """
    CREATE OR REPLACE FUNCTION keep_content_day(kept date) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = public, pg_temp SET timezone = 'UTC' SET lock_timeout = '400ms'
    AS $$
    DECLARE
        name text := 'request_content_' || to_char(kept, 'YYYYMMDD');
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext('request_content'));
        IF to_regclass(name) IS NOT NULL THEN
            RETURN;
        END IF;
        EXECUTE format(
            'CREATE TABLE %I (LIKE request_content INCLUDING INDEXES INCLUDING STORAGE)', name
        );
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format(
            'ALTER TABLE request_content ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            name, kept, kept + 1
        );
    END $$
"""
DROP = """
    CREATE OR REPLACE FUNCTION drop_content_days(before date) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = public, pg_temp SET timezone = 'UTC' SET lock_timeout = '400ms'
    AS $$
    DECLARE
        old record;
        dropped integer := 0;
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext('request_content'));
        FOR old IN
            SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
            WHERE inhparent = 'request_content'::regclass
                AND relname < 'request_content_' || to_char(before, 'YYYYMMDD')
            ORDER BY relname
        LOOP
            EXECUTE format('DROP TABLE %I', old.relname);
            dropped := dropped + 1;
        END LOOP;
        RETURN dropped;
    END $$
"""
FUNCTIONS = ("keep_content_day(date)", "drop_content_days(date)")


def upgrade() -> None:
    add_column("projects", "store_content", "boolean", default="false")
    op.execute(CONTENT)
    op.execute("ALTER TABLE request_content ALTER COLUMN content SET STORAGE EXTERNAL")
    op.execute(INDEX)
    for function in (KEEP, DROP):
        op.execute(function)
    protect("request_content", "org", read_only=True, delete=True)
    for function in FUNCTIONS:
        op.execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
        op.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {ROLE_SYSTEM}")
    op.execute("SELECT keep_content_day(current_date + n) FROM generate_series(-1, 1) AS n")


def downgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}")
    open_wall("request_content")
    op.execute("DROP TABLE request_content")
    op.execute("ALTER TABLE projects DROP COLUMN store_content")
