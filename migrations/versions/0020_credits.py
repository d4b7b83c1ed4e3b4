"""Credits: what an org has paid in advance, in the ledger; which orgs may spend no more than that.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

KINDS = "'usage', 'waste', 'suspense', 'repriced', 'reversed'"
ACCOUNTS = """
    WHEN id LIKE 'receivable:%' THEN 'receivable'
    WHEN id LIKE 'revenue:%' THEN 'revenue'
    WHEN id = 'house:waste' THEN 'waste'
    WHEN id = 'house:production' THEN 'production'
    WHEN id = 'suspense' THEN 'suspense'
"""
CASH = "WHEN id = 'house:cash' THEN 'cash'"


def upgrade() -> None:
    op.execute("ALTER TABLE orgs ADD COLUMN prepaid boolean NOT NULL DEFAULT false")
    know_accounts(ACCOUNTS + CASH)
    op.execute(
        "ALTER TABLE transfers ALTER COLUMN event_id DROP NOT NULL,"
        " DROP CONSTRAINT transfers_kind_check,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({KINDS}, 'credit')),"
        " ADD CONSTRAINT transfers_event CHECK ((event_id IS NULL) = (kind = 'credit'))"
    )
    op.execute("CREATE INDEX transfers_credit ON transfers (credit, id) WHERE kind = 'credit'")


def downgrade() -> None:
    """Raises: IntegrityError where anybody has credit; transfers are never deleted."""
    op.execute("DROP INDEX transfers_credit")
    op.execute(
        "ALTER TABLE transfers ALTER COLUMN event_id SET NOT NULL,"
        " DROP CONSTRAINT transfers_event, DROP CONSTRAINT transfers_kind_check,"
        f" ADD CONSTRAINT transfers_kind_check CHECK (kind IN ({KINDS}))"
    )
    know_accounts(ACCOUNTS)
    op.execute("ALTER TABLE orgs DROP COLUMN prepaid")


def know_accounts(cases: str) -> None:
    """By their ids."""
    op.execute(
        "ALTER TABLE accounts DROP COLUMN kind, ADD COLUMN kind text NOT NULL"
        f" GENERATED ALWAYS AS (CASE {cases} END) STORED"
    )
