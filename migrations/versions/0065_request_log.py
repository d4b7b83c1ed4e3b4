"""Keep a row of each request, a partition a day, and sums of them by hour and by day.

The roles of the gateway own nothing, so two functions of the owner make and drop partitions for
them. They are made empty and attached, which hinders no reader or writer.

Revision ID: 0065
Revises: 0064
"""

from __future__ import annotations

from alembic import op

from migrations.walls import ROLE_SYSTEM, open_wall, protect

revision = "0065"
down_revision = "0064"
branch_labels = None
depends_on = None

LOG = """
    CREATE TABLE request_log (
        org text NOT NULL,
        at timestamptz NOT NULL,
        id uuid NOT NULL,
        project text NOT NULL,
        key text NOT NULL,
        model text NOT NULL,
        lane text NOT NULL,
        route text NOT NULL,
        status smallint NOT NULL,
        is_good boolean,
        duration_us bigint NOT NULL,
        ttft_us bigint,
        tpot_us bigint,
        queue_us bigint,
        uncached_tokens integer NOT NULL,
        cached_tokens integer NOT NULL,
        written_tokens integer NOT NULL,
        output_tokens integer NOT NULL,
        reasoning_tokens integer NOT NULL,
        cost_pico bigint NOT NULL,
        trace uuid NOT NULL,
        stages json,
        landed_at timestamptz NOT NULL,
        PRIMARY KEY (org, at, id)
    ) PARTITION BY RANGE (at)
"""
INDEXES = (
    "CREATE INDEX request_log_key ON request_log (org, key, at, id)",
    "CREATE INDEX request_log_failed ON request_log (org, at, id) WHERE status >= 400",
    "CREATE INDEX request_log_landed ON request_log (landed_at)",
)
KEEP = """
    CREATE FUNCTION keep_request_day(kept date) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = public, pg_temp SET timezone = 'UTC' SET lock_timeout = '400ms'
    AS $$
    DECLARE
        name text := 'request_log_' || to_char(kept, 'YYYYMMDD');
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext('request_log'));
        IF to_regclass(name) IS NOT NULL THEN
            RETURN;
        END IF;
        EXECUTE format(
            'CREATE TABLE %I (LIKE request_log INCLUDING DEFAULTS INCLUDING INDEXES)', name
        );
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format(
            'ALTER TABLE request_log ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            name, kept, kept + 1
        );
    END $$
"""
DROP = """
    CREATE FUNCTION drop_request_days(before date) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = public, pg_temp SET timezone = 'UTC' SET lock_timeout = '400ms'
    AS $$
    DECLARE
        old record;
        dropped integer := 0;
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext('request_log'));
        FOR old IN
            SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
            WHERE inhparent = 'request_log'::regclass
                AND relname < 'request_log_' || to_char(before, 'YYYYMMDD')
            ORDER BY relname
        LOOP
            EXECUTE format('DROP TABLE %I', old.relname);
            dropped := dropped + 1;
        END LOOP;
        RETURN dropped;
    END $$
"""
FUNCTIONS = ("keep_request_day(date)", "drop_request_days(date)")
COUNTS = (
    *("num_requests", "num_refused", "num_limited", "num_failed", "num_left"),
    *("num_rated", "num_good"),
    *("uncached_tokens", "cached_tokens", "written_tokens", "output_tokens", "reasoning_tokens"),
    *("duration_us", "queue_us"),
)
NUMERICS = ("cost_pico", "ttft", "tpot")


def rollup(table: str, unit: str) -> str:
    counts = ", ".join(f"{name} bigint NOT NULL" for name in COUNTS)
    numerics = ", ".join(f"{name} numeric NOT NULL" for name in NUMERICS)
    return f"""
        CREATE TABLE {table} (
            org text NOT NULL,
            {unit} timestamptz NOT NULL,
            project text NOT NULL,
            key text NOT NULL,
            model text NOT NULL,
            lane text NOT NULL,
            {counts},
            {numerics},
            PRIMARY KEY (org, {unit}, project, key, model, lane)
        ) WITH (fillfactor = 70)
    """


def upgrade() -> None:
    for statement in (LOG, *INDEXES, rollup("requests_hourly", "hour"), KEEP, DROP):
        op.execute(statement)
    op.execute(rollup("requests_daily", "day"))
    op.execute("CREATE INDEX requests_hourly_age ON requests_hourly (hour)")
    for table in ("request_log", "requests_hourly", "requests_daily"):
        protect(table, "org", read_only=True, delete=table == "requests_hourly")
    for function in FUNCTIONS:
        op.execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
        op.execute(f"GRANT EXECUTE ON FUNCTION {function} TO {ROLE_SYSTEM}")
    op.execute("SELECT keep_request_day(current_date + n) FROM generate_series(-1, 1) AS n")


def downgrade() -> None:
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}")
    for table in ("request_log", "requests_hourly", "requests_daily"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
