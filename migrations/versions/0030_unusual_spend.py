"""Alerts of spend that is unusual for its hour.

Revision ID: 0030
Revises: 0029
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

MEASURES = "'spend', 'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute'"


def upgrade() -> None:
    measure_is_one_of(f"{MEASURES}, 'unusual_spend'")


def downgrade() -> None:
    op.execute("DELETE FROM alerts WHERE measure = 'unusual_spend'")
    measure_is_one_of(MEASURES)


def measure_is_one_of(names: str) -> None:
    op.execute(
        "ALTER TABLE alerts DROP CONSTRAINT alerts_measure,"
        f" ADD CONSTRAINT alerts_measure CHECK (measure IN ({names}))"
    )
