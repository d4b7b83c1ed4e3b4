"""Narrower events: prices stand once, and what an invoice adds up is added up already.

Of an event's row two thirds were its prices, the same for thousands of events, and of its cost in
Postgres a third were indexes and references that nearly no row needs: an event's own transfer has
its id, and what a transfer corrects is looked for where it is inserted.

`late`: admitted in a period that was drafted already when it was booked. All others of an hour are
in `usage_charges`, which nothing adds to once a draft covers it. What was booked before this
migration counts as late: it is read by itself.

Revision ID: 0035
Revises: 0034
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect, share

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

COMPONENTS = (
    *("uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("reasoning_output", "embedding_input", "tool_call", "batch_queue"),
)
INPUT = "uncached_input + cache_read + cache_write_5m + cache_write_1h + embedding_input"
PRICE_SETS = (
    "CREATE TABLE price_sets (id uuid PRIMARY KEY, prices jsonb NOT NULL)",
    """
    INSERT INTO price_sets
    SELECT gen_random_uuid(), prices FROM (SELECT DISTINCT prices FROM usage_events) p
    """,
    """
    CREATE TRIGGER price_sets_immutable BEFORE UPDATE OR DELETE ON price_sets
        FOR EACH ROW EXECUTE FUNCTION refuse_to_change()
    """,
    """
    CREATE TRIGGER price_sets_keep BEFORE TRUNCATE ON price_sets
        FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()
    """,
)
EVENTS = (
    """
    ALTER TABLE usage_events
        ADD COLUMN price_set uuid,
        ADD COLUMN band bigint NOT NULL DEFAULT 0,
        ADD COLUMN late boolean NOT NULL DEFAULT true
    """,
    "ALTER TABLE usage_events DISABLE TRIGGER usage_events_immutable",
    f"""
    UPDATE usage_events u SET price_set = s.id, band = coalesce((
        SELECT max(CAST(b ->> 'min_total_input' AS bigint))
        FROM jsonb_path_query(s.prices, '$.*.bands[*]') b
        WHERE CAST(b ->> 'min_total_input' AS bigint) <= {INPUT}), 0)
    FROM price_sets s WHERE s.prices = u.prices
    """,
    "ALTER TABLE usage_events ENABLE TRIGGER usage_events_immutable",
    """
    ALTER TABLE usage_events
        ALTER COLUMN price_set SET NOT NULL,
        ALTER COLUMN band DROP DEFAULT,
        ALTER COLUMN late DROP DEFAULT,
        DROP COLUMN prices
    """,
    "DROP INDEX usage_events_late",
    "CREATE INDEX usage_events_late ON usage_events (org, seq, admitted_at) WHERE late",
)
CHARGES = f"""
    CREATE TABLE usage_charges (
        org text NOT NULL,
        hour timestamptz NOT NULL,
        project text NOT NULL,
        model text NOT NULL,
        tier text NOT NULL,
        price_set uuid NOT NULL,
        band bigint NOT NULL,
        {", ".join(f"{name} bigint NOT NULL" for name in COMPONENTS)},
        {", ".join(f"{name}_pico numeric(38,0) NOT NULL" for name in COMPONENTS)},
        {", ".join(f"{name}_requests bigint NOT NULL" for name in COMPONENTS)},
        PRIMARY KEY (org, hour, project, model, tier, price_set, band)
    ) WITH (fillfactor = 50)
"""
# Whatever corrects is checked where it is inserted, as whatever resolves or reverses already was.
CHECKED = """
    CREATE OR REPLACE FUNCTION refuse_another_shape() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        original transfers;
    BEGIN
        SELECT * INTO original FROM transfers WHERE id = coalesce(NEW.resolves, NEW.corrects);
        IF NOT FOUND THEN
            RAISE EXCEPTION '% names a transfer that is not there', NEW.id
                USING ERRCODE = 'foreign_key_violation';
        END IF;
        IF NEW.resolves IS NOT NULL AND (original.phase IS DISTINCT FROM 'pending'
            OR (NEW.debit, NEW.credit) <> (original.debit, original.credit)
            OR NEW.amount_pico > original.amount_pico
            OR (NEW.phase <> 'post' AND NEW.amount_pico <> original.amount_pico))
        THEN
            RAISE EXCEPTION '% does not resolve %', NEW.id, NEW.resolves
                USING ERRCODE = 'check_violation';
        END IF;
        IF NEW.kind = 'reversed' AND (original.phase NOT IN ('posted', 'post')
            OR (NEW.debit, NEW.credit) <> (original.credit, original.debit)
            OR NEW.amount_pico <> original.amount_pico)
        THEN
            RAISE EXCEPTION '% does not reverse %', NEW.id, NEW.corrects
                USING ERRCODE = 'check_violation';
        END IF;
        RETURN NEW;
    END $$
"""
TRANSFERS = (
    "DROP TRIGGER transfers_shape ON transfers",
    CHECKED,
    """
    CREATE TRIGGER transfers_shape BEFORE INSERT ON transfers FOR EACH ROW
        WHEN (NEW.resolves IS NOT NULL OR NEW.corrects IS NOT NULL)
        EXECUTE FUNCTION refuse_another_shape()
    """,
    """
    ALTER TABLE transfers
        DROP CONSTRAINT transfers_resolves_fkey,
        DROP CONSTRAINT transfers_corrects_fkey
    """,
    "DROP INDEX transfers_event_id",
    "CREATE INDEX transfers_of_event ON transfers (event_id) WHERE event_id <> id",
)
# A batch of events crosses as an array of these: no column of it is parsed.
ROW = f"""
    CREATE TYPE usage_row AS (
        id text, request_id text, org text, project text, key text, model text, lane text,
        tier text, kind text, finish text, price_list text, estimated boolean,
        {", ".join(f"{name} bigint" for name in COMPONENTS)},
        {", ".join(f"{name}_pico text" for name in COMPONENTS)},
        suspended boolean, price_set uuid, band bigint, digest bytea, admitted_at bigint,
        occurred_at bigint
    )
"""


def upgrade() -> None:
    for statement in (*PRICE_SETS, *EVENTS, CHARGES, *TRANSFERS, ROW):
        op.execute(statement)
    share("price_sets", readable=False)
    protect("usage_charges", "org", read_only=True)


OLD_TRANSFERS = (
    "DROP INDEX transfers_of_event",
    "CREATE INDEX transfers_event_id ON transfers (event_id)",
    """
    ALTER TABLE transfers
        ADD CONSTRAINT transfers_resolves_fkey FOREIGN KEY (resolves) REFERENCES transfers,
        ADD CONSTRAINT transfers_corrects_fkey FOREIGN KEY (corrects) REFERENCES transfers
    """,
    "DROP TRIGGER transfers_shape ON transfers",
    """
    CREATE TRIGGER transfers_shape BEFORE INSERT ON transfers FOR EACH ROW
        WHEN (NEW.resolves IS NOT NULL OR NEW.kind = 'reversed')
        EXECUTE FUNCTION refuse_another_shape()
    """,
)
OLD_EVENTS = (
    "ALTER TABLE usage_events ADD COLUMN prices jsonb",
    "ALTER TABLE usage_events DISABLE TRIGGER usage_events_immutable",
    "UPDATE usage_events u SET prices = s.prices FROM price_sets s WHERE s.id = u.price_set",
    "ALTER TABLE usage_events ENABLE TRIGGER usage_events_immutable",
    "DROP INDEX usage_events_late",
    """
    ALTER TABLE usage_events
        ALTER COLUMN prices SET NOT NULL,
        DROP COLUMN price_set,
        DROP COLUMN band,
        DROP COLUMN late
    """,
    "CREATE INDEX usage_events_late ON usage_events (org, seq, admitted_at)",
)


def downgrade() -> None:
    op.execute("DROP TYPE usage_row")
    for statement in (*OLD_TRANSFERS, *OLD_EVENTS):
        op.execute(statement)
    for table in ("usage_charges", "price_sets"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
