"""Count how requests of a rollout ended by groups of organizations, which are compared with what
they were before. What was counted of rollouts that are under way begins anew.

Revision ID: 0082
Revises: 0081
"""

from __future__ import annotations

from alembic import op

from migrations import online
from migrations.walls import share

revision = "0082"
down_revision = "0081"
branch_labels = None
depends_on = None

COUNTED = ("requests", "refused", "failed", "empty", "cut_off", "late")
NOTHING = r"'\x80'::bytea"
"""An empty map of msgpack."""
UNDER_WAY = "state IN ('running', 'paused')"


def create_counts(table: str, by: str) -> None:
    """Create a table of how requests ended, by rollout, step and a column of its own."""
    counts = ",".join(f"{name} bigint NOT NULL" for name in COUNTED)
    op.execute(
        f"""
        CREATE TABLE IF NOT EXISTS {table} (
            rollout_id text NOT NULL REFERENCES model_rollouts (id) ON DELETE CASCADE,
            step integer NOT NULL,
            {by} NOT NULL,
            {counts},
            PRIMARY KEY (rollout_id, step, {by.split()[0]})
        )
        """
    )
    share(table, readable=False, delete=True)


def forget_progress() -> None:
    online.backfill(
        "model_rollouts", "id", f"progress = {NOTHING}", f"{UNDER_WAY} AND progress <> {NOTHING}"
    )


def upgrade() -> None:
    create_counts("model_rollout_counts", "org_group integer")
    forget_progress()
    online.drop_table("model_rollout_outcomes")


def downgrade() -> None:
    create_counts("model_rollout_outcomes", "is_new boolean")
    forget_progress()
    op.execute("DROP TABLE model_rollout_counts")
