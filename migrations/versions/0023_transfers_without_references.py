"""Transfers without references: the statement that posts them writes what they refer to.

Three of them took a third of what Postgres does for an event, and locked the rows of the accounts
that all batches share. Nothing they refer to is ever deleted, and `tollgate reconcile` looks for a
transfer that hangs in the air.

Revision ID: 0023
Revises: 0022
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

REFERENCES = {"event_id": "usage_events", "debit": "accounts", "credit": "accounts"}


def upgrade() -> None:
    drops = ", ".join(f"DROP CONSTRAINT transfers_{column}_fkey" for column in REFERENCES)
    op.execute(f"ALTER TABLE transfers {drops}")
    op.execute(
        "CREATE TRIGGER accounts_keep BEFORE DELETE OR TRUNCATE ON accounts"
        " FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()"
    )


def downgrade() -> None:
    op.execute("DROP TRIGGER accounts_keep ON accounts")
    adds = ", ".join(f"ADD FOREIGN KEY ({c}) REFERENCES {t}" for c, t in REFERENCES.items())
    op.execute(f"ALTER TABLE transfers {adds}")
