"""Prepaid balances that run low: what an org wants to be told and asked for, what it was told, and
the top-ups that were asked for.

Revision ID: 0034
Revises: 0033
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

MEASURES = (
    "'spend', 'unusual_spend',"
    " 'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute'"
)
PERIODS = "'hour', 'day', 'month', 'total'"
TABLES = {
    "balance_settings": """
        org_id text PRIMARY KEY,
        low_pico numeric(38,0) CONSTRAINT balance_settings_low CHECK (low_pico >= 0),
        top_up_pico numeric(38,0) CONSTRAINT balance_settings_top_up CHECK (top_up_pico > 0),
        top_up_below_pico numeric(38,0)
            CONSTRAINT balance_settings_below CHECK (top_up_below_pico >= 0),
        top_ups_per_day smallint CONSTRAINT balance_settings_per_day CHECK (top_ups_per_day > 0),
        CONSTRAINT balance_settings_whole
            CHECK (num_nulls(top_up_pico, top_up_below_pico, top_ups_per_day) IN (0, 3))
    """,
    "top_ups": """
        id text PRIMARY KEY,
        org_id text NOT NULL,
        amount_pico numeric(38,0) NOT NULL CONSTRAINT top_ups_amount CHECK (amount_pico > 0),
        left_pico numeric(38,0) NOT NULL,
        state text NOT NULL DEFAULT 'requested' CONSTRAINT top_ups_state CHECK
            (state IN ('requested', 'granted', 'failed', 'expired')),
        requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        expires_at timestamptz NOT NULL,
        ended_at timestamptz,
        credit_id text,
        failure text,
        told text,
        CONSTRAINT top_ups_ended CHECK ((ended_at IS NULL) = (state = 'requested')),
        CONSTRAINT top_ups_granted CHECK ((credit_id IS NOT NULL) = (state = 'granted'))
    """,
}
INDEXES = (
    "CREATE INDEX top_ups_of_org ON top_ups (org_id, id)",
    "CREATE INDEX top_ups_waiting ON top_ups (expires_at) WHERE state = 'requested'",
    "CREATE INDEX top_ups_outbox ON top_ups (id) WHERE told IS DISTINCT FROM state",
)


def upgrade() -> None:
    for table, columns in TABLES.items():
        op.execute(f"CREATE TABLE {table} ({columns})")
        protect(table, read_only=True)
    for index in INDEXES:
        op.execute(index)
    op.execute(
        "ALTER TABLE credit_lines ADD COLUMN is_low boolean NOT NULL DEFAULT false,"
        " ADD COLUMN dry_at_pico numeric(38,0), ADD COLUMN top_up_id text"
    )
    alerts_are_of(f"{MEASURES}, 'credits_low', 'credits_exhausted'", f"{PERIODS}, 'crossing'")


def downgrade() -> None:
    op.execute("DELETE FROM alerts WHERE period = 'crossing'")
    alerts_are_of(MEASURES, PERIODS)
    op.execute(
        "ALTER TABLE credit_lines DROP COLUMN is_low, DROP COLUMN dry_at_pico,"
        " DROP COLUMN top_up_id"
    )
    for table in reversed(TABLES):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")


def alerts_are_of(measures: str, periods: str) -> None:
    op.execute(
        "ALTER TABLE alerts DROP CONSTRAINT alerts_measure, DROP CONSTRAINT alerts_period,"
        f" ADD CONSTRAINT alerts_measure CHECK (measure IN ({measures})),"
        f" ADD CONSTRAINT alerts_period CHECK (period IN ({periods}))"
    )
