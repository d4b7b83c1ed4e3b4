"""Keep which share of a limit each cell has, and what it was asked for.

Revision ID: 0081
Revises: 0080
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0081"
down_revision = "0080"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE cell_shares (
        scope text PRIMARY KEY,
        version integer NOT NULL,
        shares jsonb NOT NULL,
        before jsonb NOT NULL,
        moves_left integer NOT NULL,
        decided_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE TABLE cell_demands (
        scope text NOT NULL,
        cell text NOT NULL,
        asked double precision NOT NULL,
        announced bigint NOT NULL DEFAULT 0,
        heard_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (scope, cell)
    )
    """,
)
TABLES = ("cell_shares", "cell_demands")


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table in TABLES:
        share(table, readable=False, delete=True)


def downgrade() -> None:
    for table in reversed(TABLES):
        op.execute(f"DROP TABLE {table}")
