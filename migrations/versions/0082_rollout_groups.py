"""Count how requests of a rollout ended by groups of organizations, which are compared with what
they were before. What was counted of rollouts that are under way begins anew.

Revision ID: 0082
Revises: 0081
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0082"
down_revision = "0081"
branch_labels = None
depends_on = None

COUNTED = ("requests", "refused", "failed", "empty", "cut_off", "late")


def count_by(column: str) -> None:
    """Make the table of outcomes anew, with counts by a column, and begin with all of them."""
    counts = ",".join(f"{name} bigint NOT NULL" for name in COUNTED)
    op.execute("DROP TABLE model_rollout_outcomes")
    op.execute(
        f"""
        CREATE TABLE model_rollout_outcomes (
            rollout_id text NOT NULL REFERENCES model_rollouts (id) ON DELETE CASCADE,
            step integer NOT NULL,
            {column} NOT NULL,
            {counts},
            PRIMARY KEY (rollout_id, step, {column.split()[0]})
        )
        """
    )
    share("model_rollout_outcomes", readable=False, delete=True)
    op.execute(
        r"UPDATE model_rollouts SET progress = '\x80' WHERE state IN ('running', 'paused')"
    )  # an empty map of msgpack


def upgrade() -> None:
    count_by("org_group integer")


def downgrade() -> None:
    count_by("is_new boolean")
