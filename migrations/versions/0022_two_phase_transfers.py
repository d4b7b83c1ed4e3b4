"""Two-phase transfers: what is pending holds an amount until one row posts, voids or expires it.

Balances say apart what is pending, and a grant's account is never overdrawn by both together. What
a row resolves or reverses is checked where it is inserted; rows that do neither pay nothing for it.

Revision ID: 0022
Revises: 0021
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

KINDS = "'usage', 'waste', 'suspense', 'repriced', 'reversed', 'credit'"
ACCOUNTS = """
    WHEN id LIKE 'receivable:%' THEN 'receivable'
    WHEN id LIKE 'revenue:%' THEN 'revenue'
    WHEN id = 'house:waste' THEN 'waste'
    WHEN id = 'house:production' THEN 'production'
    WHEN id = 'suspense' THEN 'suspense'
    WHEN id = 'house:cash' THEN 'cash'
"""
GRANTS = """
    WHEN id LIKE 'grant:%' THEN 'grant'
    WHEN id = 'house:breakage' THEN 'breakage'
"""
OF_AN_EVENT = "kind IN ('usage', 'waste', 'suspense', 'repriced')"
TRANSFERS = (
    f"""
    ALTER TABLE transfers
        ADD COLUMN phase text NOT NULL DEFAULT 'posted' CONSTRAINT transfers_phase
            CHECK (phase IN ('posted', 'pending', 'post', 'void', 'expire')),
        ADD COLUMN resolves text REFERENCES transfers,
        ADD COLUMN expires_at timestamptz,
        DROP CONSTRAINT transfers_kind_check,
        ADD CONSTRAINT transfers_kind_check
            CHECK (kind IN ({KINDS}, 'lease', 'burn', 'expired', 'revoked')),
        DROP CONSTRAINT transfers_event,
        ADD CONSTRAINT transfers_event CHECK (event_id IS NOT NULL OR NOT {OF_AN_EVENT}),
        ADD CONSTRAINT transfers_only_leases_pend
            CHECK ((phase = 'posted') = (kind <> 'lease')),
        ADD CONSTRAINT transfers_resolves
            CHECK ((resolves IS NOT NULL) = (phase IN ('post', 'void', 'expire'))),
        ADD CONSTRAINT transfers_expires_at CHECK ((expires_at IS NOT NULL) = (phase = 'pending')),
        ADD CONSTRAINT transfers_reversed CHECK (kind <> 'reversed' OR corrects IS NOT NULL),
        DROP CONSTRAINT transfers_corrects_key
    """,
    # Partial: what was ingested, nearly all there is, stands in neither.
    """
    CREATE UNIQUE INDEX transfers_resolved_once ON transfers (resolves)
        WHERE resolves IS NOT NULL
    """,
    """
    CREATE UNIQUE INDEX transfers_corrected_once ON transfers (corrects)
        WHERE corrects IS NOT NULL
    """,
    """
    CREATE FUNCTION refuse_another_shape() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        original transfers;
    BEGIN
        SELECT * INTO original FROM transfers WHERE id = coalesce(NEW.resolves, NEW.corrects);
        IF NEW.resolves IS NOT NULL AND (original.phase IS DISTINCT FROM 'pending'
            OR (NEW.debit, NEW.credit) <> (original.debit, original.credit)
            OR NEW.amount_pico > original.amount_pico
            OR (NEW.phase <> 'post' AND NEW.amount_pico <> original.amount_pico))
        THEN
            RAISE EXCEPTION '% does not resolve %', NEW.id, NEW.resolves
                USING ERRCODE = 'check_violation';
        END IF;
        IF NEW.kind = 'reversed' AND (coalesce(original.phase, '') NOT IN ('posted', 'post')
            OR (NEW.debit, NEW.credit) <> (original.credit, original.debit)
            OR NEW.amount_pico <> original.amount_pico)
        THEN
            RAISE EXCEPTION '% does not reverse %', NEW.id, NEW.corrects
                USING ERRCODE = 'check_violation';
        END IF;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER transfers_shape BEFORE INSERT ON transfers FOR EACH ROW
        WHEN (NEW.resolves IS NOT NULL OR NEW.kind = 'reversed')
        EXECUTE FUNCTION refuse_another_shape()
    """,
)
BALANCES = """
    ALTER TABLE balances
        ADD COLUMN pending_debits_pico numeric(38,0) NOT NULL DEFAULT 0
            CONSTRAINT balances_pending_debits CHECK (pending_debits_pico >= 0),
        ADD COLUMN pending_credits_pico numeric(38,0) NOT NULL DEFAULT 0
            CONSTRAINT balances_pending_credits CHECK (pending_credits_pico >= 0),
        ADD CONSTRAINT balances_no_grant_overdrawn CHECK (account NOT LIKE 'grant:%'
            OR debits_pico + pending_debits_pico <= credits_pico)
"""


def upgrade() -> None:
    know_accounts(ACCOUNTS + GRANTS)
    for statement in (*TRANSFERS, BALANCES):
        op.execute(statement)
    show_entries("transfers WHERE phase IN ('posted', 'post')")


def downgrade() -> None:
    """Raises: IntegrityError where there is a grant or a lease; transfers are never deleted."""
    op.execute(
        "ALTER TABLE balances DROP COLUMN pending_debits_pico, DROP COLUMN pending_credits_pico"
    )
    op.execute("DROP TRIGGER transfers_shape ON transfers")
    op.execute("DROP FUNCTION refuse_another_shape")
    show_entries("transfers")
    op.execute("DROP INDEX transfers_corrected_once")
    op.execute(
        "ALTER TABLE transfers DROP COLUMN phase, DROP COLUMN resolves, DROP COLUMN expires_at,"
        " DROP CONSTRAINT transfers_kind_check, DROP CONSTRAINT transfers_event,"
        " DROP CONSTRAINT transfers_reversed,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({KINDS})),"
        " ADD CONSTRAINT transfers_event CHECK ((event_id IS NULL) = (kind = 'credit')),"
        " ADD CONSTRAINT transfers_corrects_key UNIQUE (corrects)"
    )
    know_accounts(ACCOUNTS)


def show_entries(of: str) -> None:
    """Each transfer's two sides, of those of `of`."""
    op.execute(f"""
        CREATE OR REPLACE VIEW entries AS
            SELECT debit AS account, id AS transfer_id, amount_pico AS debit_pico,
                   0::numeric(38,0) AS credit_pico FROM {of}
            UNION ALL
            SELECT credit, id, 0, amount_pico FROM {of}
    """)


def know_accounts(cases: str) -> None:
    """By their ids."""
    op.execute(
        "ALTER TABLE accounts DROP COLUMN kind, ADD COLUMN kind text NOT NULL"
        f" GENERATED ALWAYS AS (CASE {cases} END) STORED"
    )
