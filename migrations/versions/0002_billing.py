"""Billing: prices, usage events, the ledger, the hourly rollup.

Money is numeric(38,0) of pico-USD: a bigint of them ends at $9.2 M. What was once booked never
changes, which triggers enforce; a correction is a new transfer that names the old one.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

QUANTITIES = """
    uncached_input bigint NOT NULL CHECK (uncached_input >= 0),
    cache_read bigint NOT NULL CHECK (cache_read >= 0),
    cache_write_5m bigint NOT NULL CHECK (cache_write_5m >= 0),
    cache_write_1h bigint NOT NULL CHECK (cache_write_1h >= 0),
    output bigint NOT NULL CHECK (output >= 0),
"""
AMOUNTS = """
    uncached_input_pico numeric(38,0) NOT NULL CHECK (uncached_input_pico >= 0),
    cache_read_pico numeric(38,0) NOT NULL CHECK (cache_read_pico >= 0),
    cache_write_5m_pico numeric(38,0) NOT NULL CHECK (cache_write_5m_pico >= 0),
    cache_write_1h_pico numeric(38,0) NOT NULL CHECK (cache_write_1h_pico >= 0),
    output_pico numeric(38,0) NOT NULL CHECK (output_pico >= 0),
"""

PRICES = (
    """
    CREATE TABLE price_keys (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        model text NOT NULL,
        component text NOT NULL,
        UNIQUE (model, component)
    )
    """,
    # Ranges of one key cannot overlap. The key is a range too, because that needs no extension.
    """
    CREATE TABLE prices (
        price_id text PRIMARY KEY,
        key_id bigint NOT NULL REFERENCES price_keys,
        pico_per_token bigint NOT NULL CHECK (pico_per_token >= 0),
        valid tstzrange NOT NULL CHECK (NOT isempty(valid) AND NOT lower_inf(valid)),
        CONSTRAINT prices_no_overlap EXCLUDE USING gist
            (int8range(key_id, key_id, '[]') WITH &&, valid WITH &&)
    )
    """,
    """
    CREATE FUNCTION only_close_a_price() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'UPDATE' AND upper_inf(OLD.valid) AND NOT upper_inf(NEW.valid)
            AND lower(NEW.valid) = lower(OLD.valid)
            AND (NEW.price_id, NEW.key_id, NEW.pico_per_token)
                = (OLD.price_id, OLD.key_id, OLD.pico_per_token)
        THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'price % cannot change; add one with a later start', OLD.price_id;
    END $$
    """,
    """
    CREATE TRIGGER prices_append_only BEFORE UPDATE OR DELETE ON prices
        FOR EACH ROW EXECUTE FUNCTION only_close_a_price()
    """,
)

EVENTS = (
    f"""
    CREATE TABLE usage_events (
        id text PRIMARY KEY,
        request_id text NOT NULL,
        org text NOT NULL,
        project text NOT NULL,
        key text NOT NULL,
        model text NOT NULL,
        lane text NOT NULL,
        tier text NOT NULL,
        kind text NOT NULL CHECK (kind IN ('usage', 'waste')),
        finish text NOT NULL,
        estimated boolean NOT NULL,
        {QUANTITIES}
        {AMOUNTS}
        suspended boolean NOT NULL,
        prices jsonb NOT NULL,
        digest bytea NOT NULL,
        admitted_at timestamptz NOT NULL,
        occurred_at timestamptz NOT NULL,
        ingested_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    "CREATE INDEX usage_events_org_admitted_at ON usage_events (org, admitted_at)",
    """
    CREATE TABLE usage_conflicts (
        event_id text NOT NULL,
        digest bytea NOT NULL,
        event jsonb NOT NULL,
        seen_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (event_id, digest)
    )
    """,
    f"""
    CREATE TABLE usage_hourly (
        org text NOT NULL,
        hour timestamptz NOT NULL,
        project text NOT NULL,
        key text NOT NULL,
        model text NOT NULL,
        tier text NOT NULL,
        batch boolean NOT NULL,
        {QUANTITIES}
        {AMOUNTS}
        num_requests bigint NOT NULL,
        PRIMARY KEY (org, hour, project, key, model, tier, batch)
    )
    """,
)

LEDGER = (
    """
    CREATE TABLE accounts (
        id text PRIMARY KEY,
        kind text NOT NULL GENERATED ALWAYS AS (CASE
            WHEN id LIKE 'receivable:%' THEN 'receivable'
            WHEN id LIKE 'revenue:%' THEN 'revenue'
            WHEN id = 'house:waste' THEN 'waste'
            WHEN id = 'house:production' THEN 'production'
            WHEN id = 'suspense' THEN 'suspense'
        END) STORED
    )
    """,
    """
    CREATE TABLE transfers (
        id text PRIMARY KEY,
        event_id text NOT NULL REFERENCES usage_events,
        debit text NOT NULL REFERENCES accounts,
        credit text NOT NULL REFERENCES accounts,
        amount_pico numeric(38,0) NOT NULL CHECK (amount_pico >= 0),
        kind text NOT NULL CHECK (kind IN ('usage', 'waste', 'suspense', 'repriced')),
        corrects text UNIQUE REFERENCES transfers,
        admitted_at timestamptz NOT NULL,
        posted_at timestamptz NOT NULL DEFAULT now(),
        CHECK (debit <> credit)
    )
    """,
    "CREATE INDEX transfers_event_id ON transfers (event_id)",
    "CREATE INDEX transfers_suspense ON transfers (id) WHERE kind = 'suspense'",
    """
    CREATE VIEW entries AS
        SELECT debit AS account, id AS transfer_id, amount_pico AS debit_pico,
               0::numeric(38,0) AS credit_pico FROM transfers
        UNION ALL
        SELECT credit, id, 0, amount_pico FROM transfers
    """,
    """
    CREATE TABLE balances (
        account text PRIMARY KEY REFERENCES accounts,
        debits_pico numeric(38,0) NOT NULL CHECK (debits_pico >= 0),
        credits_pico numeric(38,0) NOT NULL CHECK (credits_pico >= 0)
    )
    """,
    """
    CREATE FUNCTION refuse_to_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION '% is immutable; post a correction', TG_TABLE_NAME;
    END $$
    """,
)


def upgrade() -> None:
    for statement in (*PRICES, *EVENTS, *LEDGER):
        op.execute(statement)
    for table in ("usage_events", "transfers", "usage_conflicts"):
        op.execute(
            f"CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
        )
    for table in ("usage_events", "transfers", "usage_conflicts", "prices"):
        op.execute(
            f"CREATE TRIGGER {table}_keep BEFORE TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()"
        )


def downgrade() -> None:
    op.execute("DROP VIEW entries")
    for table in (
        "balances",
        "transfers",
        "accounts",
        "usage_hourly",
        "usage_conflicts",
        "usage_events",
        "prices",
        "price_keys",
    ):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION only_close_a_price")
    op.execute("DROP FUNCTION refuse_to_change")
