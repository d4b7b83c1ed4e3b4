"""Invoices: accounts, periods, lines, numbers, credit notes, payments, dunning.

Postings get a number of their own (`posting_seq`), in the order in which they are booked as seen by
who holds the books alone: an invoice says with one such number up to where it counts, and no clock
that is set back can make it count anything twice, or nothing at all.

Revision ID: 0026
Revises: 0025
"""

from __future__ import annotations

from alembic import op

from migrations.walls import ROLE_SYSTEM, open_wall, protect, share

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

KINDS = (
    "'usage', 'waste', 'suspense', 'repriced', 'reversed', 'credit',"
    " 'lease', 'burn', 'expired', 'revoked'"
)
INVOICED = "'rounding', 'adjustment', 'payment', 'credit_note'"
ACCOUNTS = """
    WHEN id LIKE 'receivable:%' THEN 'receivable'
    WHEN id LIKE 'revenue:%' THEN 'revenue'
    WHEN id = 'house:waste' THEN 'waste'
    WHEN id = 'house:production' THEN 'production'
    WHEN id = 'suspense' THEN 'suspense'
    WHEN id = 'house:cash' THEN 'cash'
    WHEN id LIKE 'grant:%' THEN 'grant'
    WHEN id = 'house:breakage' THEN 'breakage'
"""
HOUSE = """
    WHEN id = 'house:rounding' THEN 'rounding'
    WHEN id = 'house:adjustments' THEN 'adjustments'
    WHEN id = 'house:credit_notes' THEN 'credit_notes'
"""
STATES = """
    'draft', 'finalized', 'past_due', 'reminder_1', 'reminder_2', 'reminder_3', 'suspended',
    'uncollectible', 'paid', 'voided'
"""
POSTINGS = (
    "CREATE SEQUENCE posting_seq",
    f"GRANT USAGE ON SEQUENCE posting_seq TO {ROLE_SYSTEM}",
    "ALTER TABLE usage_events ADD COLUMN seq bigint NOT NULL DEFAULT nextval('posting_seq')",
    "ALTER TABLE transfers ADD COLUMN seq bigint NOT NULL DEFAULT nextval('posting_seq')",
    # Late events of an org are found in the index alone.
    "CREATE INDEX usage_events_late ON usage_events (org, seq, admitted_at)",
    """
    CREATE INDEX transfers_corrections ON transfers (seq)
        WHERE event_id IS NOT NULL AND kind NOT IN ('usage', 'waste', 'suspense')
    """,
)
TABLES = (
    """
    CREATE TABLE billing_accounts (
        org_id text NOT NULL REFERENCES orgs,
        version integer NOT NULL CONSTRAINT billing_accounts_version CHECK (version > 0),
        currency text NOT NULL CONSTRAINT billing_accounts_currency CHECK (currency ~ '^[A-Z]{3}$'),
        timezone text NOT NULL,
        issuer text NOT NULL CONSTRAINT billing_accounts_issuer
            CHECK (issuer ~ '^[A-Z0-9]{1,16}$'),
        billing_day smallint NOT NULL CONSTRAINT billing_accounts_day
            CHECK (billing_day BETWEEN 1 AND 31),
        net_days smallint NOT NULL CONSTRAINT billing_accounts_net
            CHECK (net_days BETWEEN 0 AND 365),
        grace_hours smallint NOT NULL CONSTRAINT billing_accounts_grace
            CHECK (grace_hours BETWEEN 0 AND 720),
        created_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (org_id, version)
    )
    """,
    """
    CREATE TABLE fx_rates (
        currency text NOT NULL CONSTRAINT fx_rates_currency
            CHECK (currency ~ '^[A-Z]{3}$' AND currency <> 'USD'),
        valid_from timestamptz NOT NULL,
        coin_pico numeric(38,0) NOT NULL CONSTRAINT fx_rates_positive CHECK (coin_pico > 0),
        source text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (currency, valid_from)
    )
    """,
    # Periods of one org cannot overlap. The org is a range too, because that needs no extension.
    f"""
    CREATE TABLE invoices (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        account_version integer NOT NULL,
        currency text NOT NULL,
        issuer text NOT NULL,
        state text NOT NULL CONSTRAINT invoices_state CHECK (state IN ({STATES})),
        state_since timestamptz NOT NULL,
        period_start timestamptz NOT NULL,
        period_end timestamptz NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        since bigint NOT NULL,
        cutoff bigint NOT NULL,
        exact_pico numeric(38,0) NOT NULL DEFAULT 0,
        coin_pico numeric(38,0),
        rate_from timestamptz,
        total_coins numeric(38,0),
        residual_pico numeric(38,0),
        sequence bigint,
        number text CONSTRAINT invoices_number UNIQUE,
        finalized_at timestamptz,
        due_at timestamptz,
        CONSTRAINT invoices_account FOREIGN KEY (org_id, account_version)
            REFERENCES billing_accounts,
        CONSTRAINT invoices_of_org UNIQUE (org_id, id),
        CONSTRAINT invoices_sequence UNIQUE (issuer, sequence),
        CONSTRAINT invoices_period CHECK (period_start < period_end),
        CONSTRAINT invoices_window CHECK (since <= cutoff),
        CONSTRAINT invoices_final CHECK (CASE WHEN state = 'draft'
            THEN num_nonnulls(sequence, number, finalized_at, due_at) = 0
            ELSE num_nulls(sequence, number, finalized_at, due_at, coin_pico, total_coins,
                residual_pico) = 0 END),
        CONSTRAINT invoices_exact
            CHECK (exact_pico = total_coins * coin_pico + residual_pico),
        CONSTRAINT invoices_no_overlap EXCLUDE USING gist (
            int8range(hashtextextended(org_id, 0), hashtextextended(org_id, 0), '[]') WITH &&,
            tstzrange(period_start, period_end) WITH &&)
    )
    """,
    "CREATE INDEX invoices_open ON invoices (state, due_at) WHERE state NOT IN ('paid', 'voided')",
    """
    CREATE TABLE invoice_lines (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        invoice_id text NOT NULL,
        position integer NOT NULL,
        kind text NOT NULL CONSTRAINT invoice_lines_kind
            CHECK (kind IN ('usage', 'late', 'correction', 'adjustment')),
        usage_start timestamptz NOT NULL,
        usage_end timestamptz NOT NULL,
        project text NOT NULL,
        model text NOT NULL,
        tier text NOT NULL,
        component text NOT NULL,
        price_id text NOT NULL,
        pico_per_token bigint,
        quantity numeric(38,0) NOT NULL,
        num_requests bigint NOT NULL,
        exact_pico numeric(38,0) NOT NULL,
        amount_coins numeric(38,0),
        residual_pico numeric(38,0),
        CONSTRAINT invoice_lines_invoice FOREIGN KEY (org_id, invoice_id)
            REFERENCES invoices (org_id, id),
        CONSTRAINT invoice_lines_position UNIQUE (invoice_id, position),
        CONSTRAINT invoice_lines_of_org UNIQUE (org_id, id)
    )
    """,
    """
    CREATE TABLE invoice_counters (
        issuer text NOT NULL,
        series text NOT NULL CONSTRAINT invoice_counters_series
            CHECK (series IN ('invoice', 'credit_note')),
        last bigint NOT NULL CONSTRAINT invoice_counters_last CHECK (last > 0),
        PRIMARY KEY (issuer, series)
    )
    """,
    f"""
    CREATE TABLE invoice_transitions (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        invoice_id text NOT NULL,
        state text NOT NULL CONSTRAINT invoice_transitions_state CHECK (state IN ({STATES})),
        occurred_at timestamptz NOT NULL,
        dispatched_at timestamptz,
        CONSTRAINT invoice_transitions_once UNIQUE (invoice_id, state),
        CONSTRAINT invoice_transitions_invoice FOREIGN KEY (org_id, invoice_id)
            REFERENCES invoices (org_id, id)
    )
    """,
    """
    CREATE INDEX invoice_transitions_outbox ON invoice_transitions (id)
        WHERE dispatched_at IS NULL
    """,
    """
    CREATE TABLE credit_notes (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        invoice_id text NOT NULL,
        issuer text NOT NULL,
        sequence bigint NOT NULL,
        number text NOT NULL CONSTRAINT credit_notes_number UNIQUE,
        reason text NOT NULL,
        total_coins numeric(38,0) NOT NULL CONSTRAINT credit_notes_total CHECK (total_coins > 0),
        created_at timestamptz NOT NULL,
        CONSTRAINT credit_notes_sequence UNIQUE (issuer, sequence),
        CONSTRAINT credit_notes_of_org UNIQUE (org_id, id),
        CONSTRAINT credit_notes_invoice FOREIGN KEY (org_id, invoice_id)
            REFERENCES invoices (org_id, id)
    )
    """,
    "CREATE INDEX credit_notes_of_invoice ON credit_notes (invoice_id)",
    """
    CREATE TABLE credit_note_lines (
        credit_note_id text NOT NULL,
        line_id text NOT NULL,
        org_id text NOT NULL,
        amount_coins numeric(38,0) NOT NULL CONSTRAINT credit_note_lines_amount
            CHECK (amount_coins > 0),
        PRIMARY KEY (credit_note_id, line_id),
        CONSTRAINT credit_note_lines_note FOREIGN KEY (org_id, credit_note_id)
            REFERENCES credit_notes (org_id, id),
        CONSTRAINT credit_note_lines_line FOREIGN KEY (org_id, line_id)
            REFERENCES invoice_lines (org_id, id)
    )
    """,
    "CREATE INDEX credit_note_lines_of_line ON credit_note_lines (line_id)",
    """
    CREATE TABLE invoice_payments (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        invoice_id text NOT NULL,
        method text NOT NULL CONSTRAINT invoice_payments_method
            CHECK (method IN ('received', 'balance')),
        reference text NOT NULL,
        amount_coins numeric(38,0) NOT NULL CONSTRAINT invoice_payments_amount
            CHECK (amount_coins <> 0 AND (amount_coins > 0 OR method = 'balance')),
        created_at timestamptz NOT NULL,
        CONSTRAINT invoice_payments_invoice FOREIGN KEY (org_id, invoice_id)
            REFERENCES invoices (org_id, id)
    )
    """,
    "CREATE INDEX invoice_payments_of_invoice ON invoice_payments (invoice_id)",
)
TRIGGERS = (
    """
    CREATE FUNCTION keep_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'UPDATE' AND (OLD.state = 'draft' OR (NEW.state <> 'draft'
            AND to_jsonb(NEW) - ARRAY['state', 'state_since']
                = to_jsonb(OLD) - ARRAY['state', 'state_since']))
        THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'invoice % stays as it is; correct it with a credit note', OLD.id;
    END $$
    """,
    """
    CREATE TRIGGER invoices_final BEFORE UPDATE OR DELETE ON invoices
        FOR EACH ROW EXECUTE FUNCTION keep_invoice()
    """,
    """
    CREATE FUNCTION keep_invoice_lines() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM invoices WHERE state <> 'draft' AND id IN (
            CASE WHEN TG_OP <> 'INSERT' THEN OLD.invoice_id END,
            CASE WHEN TG_OP <> 'DELETE' THEN NEW.invoice_id END))
        THEN
            RAISE EXCEPTION 'the lines of a final invoice stay as they are';
        END IF;
        RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    END $$
    """,
    """
    CREATE TRIGGER invoice_lines_final BEFORE INSERT OR UPDATE OR DELETE ON invoice_lines
        FOR EACH ROW EXECUTE FUNCTION keep_invoice_lines()
    """,
)
ADDED_TO = (
    "billing_accounts",
    "fx_rates",
    "credit_notes",
    "credit_note_lines",
    "invoice_payments",
)
"""Tables of which no row ever changes."""
KEPT = (*ADDED_TO, "invoices", "invoice_lines", "invoice_transitions")
OF_TENANTS = (
    "billing_accounts",
    "invoices",
    "invoice_transitions",
    "credit_notes",
    "credit_note_lines",
    "invoice_payments",
)
"""Written by the system about a tenant."""


def upgrade() -> None:
    know_accounts(ACCOUNTS + HOUSE)
    know_kinds(f"{KINDS}, {INVOICED}")
    for statement in (*POSTINGS, *TABLES, *TRIGGERS):
        op.execute(statement)
    for table in ADDED_TO:
        op.execute(
            f"CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
        )
    for table in KEPT:
        op.execute(
            f"CREATE TRIGGER {table}_keep BEFORE TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()"
        )
    for table in OF_TENANTS:
        protect(table, read_only=True)
    protect("invoice_lines", read_only=True, delete=True)
    share("fx_rates")
    share("invoice_counters", readable=False)


def downgrade() -> None:
    """Raises: IntegrityError where anything was invoiced; transfers are never deleted."""
    know_kinds(KINDS)
    for table in (
        "invoice_payments",
        "credit_note_lines",
        "credit_notes",
        "invoice_transitions",
        "invoice_counters",
        "invoice_lines",
        "invoices",
        "fx_rates",
        "billing_accounts",
    ):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION keep_invoice")
    op.execute("DROP FUNCTION keep_invoice_lines")
    op.execute("ALTER TABLE usage_events DROP COLUMN seq")
    op.execute("ALTER TABLE transfers DROP COLUMN seq")
    op.execute("DROP SEQUENCE posting_seq")
    know_accounts(ACCOUNTS)


def know_kinds(kinds: str) -> None:
    op.execute(
        "ALTER TABLE transfers DROP CONSTRAINT transfers_kind_check,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({kinds}))"
    )


def know_accounts(cases: str) -> None:
    """By their ids."""
    op.execute(
        "ALTER TABLE accounts DROP COLUMN kind, ADD COLUMN kind text NOT NULL"
        f" GENERATED ALWAYS AS (CASE {cases} END) STORED"
    )
