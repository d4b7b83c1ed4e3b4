"""Ratings: what an event costs after all, and the re-ratings that say so; and credits that get back
what they paid too much.

An event stays as it was booked; each rating of it is a row of its own, in the transaction that
posts it. What was priced late before becomes a rating, too: of the components that had no price the
first one has all of the amount, for how it was split stands in the rollups alone.

Revision ID: 0033
Revises: 0032
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

KINDS = (
    "'usage', 'waste', 'suspense', 'repriced', 'reversed', 'credit',"
    " 'lease', 'burn', 'expired', 'revoked',"
    " 'rounding', 'adjustment', 'payment', 'credit_note'"
)
COMPONENTS = (
    *("uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("reasoning_output", "embedding_input", "tool_call", "batch_queue"),
)
PRICED_AS = {"reasoning_output": "output", "embedding_input": "uncached_input"}
AMOUNTS = ", ".join(
    f"{name}_pico numeric(38,0) NOT NULL CHECK ({name}_pico >= 0)" for name in COMPONENTS
)
TABLES = {
    "reratings": """
        id text PRIMARY KEY,
        org_id text NOT NULL,
        starts_at timestamptz NOT NULL,
        ends_at timestamptz NOT NULL,
        model text,
        price_list text,
        digest text NOT NULL,
        tariff jsonb NOT NULL,
        lines jsonb NOT NULL,
        cutoff bigint NOT NULL,
        num_events bigint NOT NULL,
        num_applied bigint NOT NULL DEFAULT 0,
        seen_at timestamptz,
        seen_id text NOT NULL DEFAULT '',
        created_at timestamptz NOT NULL DEFAULT now(),
        applied_at timestamptz,
        CONSTRAINT reratings_once UNIQUE (org_id, digest),
        CONSTRAINT reratings_span CHECK (starts_at < ends_at),
        CONSTRAINT reratings_counts CHECK (num_applied BETWEEN 0 AND num_events)
    """,
    "event_ratings": f"""
        event_id text NOT NULL,
        number integer NOT NULL CONSTRAINT event_ratings_number CHECK (number > 0),
        org_id text NOT NULL,
        rerating_id text REFERENCES reratings,
        prices jsonb NOT NULL,
        {AMOUNTS},
        admitted_at timestamptz NOT NULL,
        seq bigint NOT NULL DEFAULT nextval('posting_seq'),
        PRIMARY KEY (event_id, number)
    """,
}
OLD_CORRECTIONS = """
    CREATE INDEX transfers_corrections ON transfers (seq)
        WHERE event_id IS NOT NULL AND kind NOT IN ('usage', 'waste', 'suspense')
"""
"""An invoice finds what was corrected in the ratings."""
STATEMENTS = (
    "DROP INDEX transfers_corrections",
    # One after the other: what the next is shown is what the one before has made.
    "CREATE UNIQUE INDEX reratings_open ON reratings (org_id) WHERE applied_at IS NULL",
    "CREATE INDEX event_ratings_posted ON event_ratings (org_id, seq)",
    "CREATE INDEX event_ratings_admitted ON event_ratings (org_id, admitted_at)",
    "ALTER TABLE credit_burns DROP CONSTRAINT credit_burns_amount_pico_check,"
    " ADD CONSTRAINT credit_burns_amount CHECK (amount_pico <> 0)",
    "CREATE TRIGGER event_ratings_immutable BEFORE UPDATE OR DELETE ON event_ratings"
    " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()",
    "CREATE TRIGGER event_ratings_keep BEFORE TRUNCATE ON event_ratings"
    " FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()",
)


def upgrade() -> None:
    for table, columns in TABLES.items():
        op.execute(f"CREATE TABLE {table} ({columns})")
        protect(table, read_only=True)
    op.execute(_from_what_was_priced_late())
    for statement in STATEMENTS:
        op.execute(statement)
    know_kinds(f"{KINDS}, 'returned'")


def downgrade() -> None:
    """Raises: IntegrityError where a credit got anything back; transfers are never deleted."""
    know_kinds(KINDS)
    op.execute(OLD_CORRECTIONS)
    op.execute(
        "ALTER TABLE credit_burns DROP CONSTRAINT credit_burns_amount,"
        " ADD CONSTRAINT credit_burns_amount_pico_check CHECK (amount_pico > 0)"
    )
    for table in reversed(TABLES):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")


def know_kinds(kinds: str) -> None:
    op.execute(
        "ALTER TABLE transfers DROP CONSTRAINT transfers_kind_check,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({kinds}))"
    )


def _from_what_was_priced_late() -> str:
    unpriced = " ".join(
        f"WHEN {name} > 0 AND NOT prices ?| ARRAY['{name}', '{PRICED_AS.get(name, name)}']"
        f" THEN '{name}'"
        for name in COMPONENTS
    )
    columns = ", ".join(f"{name}_pico" for name in COMPONENTS)
    amounts = ", ".join(
        f"{name}_pico + CASE unpriced WHEN '{name}' THEN amount_pico ELSE 0 END"
        for name in COMPONENTS
    )
    return f"""
        INSERT INTO event_ratings (event_id, number, org_id, prices, admitted_at, seq, {columns})
        SELECT id, 1, org, prices, admitted_at, posting, {amounts} FROM (
            SELECT u.*, t.amount_pico, t.seq AS posting,
                CASE {unpriced} ELSE 'output' END AS unpriced
            FROM transfers t JOIN usage_events u ON u.id = t.event_id WHERE t.kind = 'repriced'
        ) late
    """
