"""Reconciliations: of each host and day, whether engines, spools and books agreed.

Revision ID: 0032
Revises: 0031
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, share

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

TABLE = """
    CREATE TABLE reconciliations (
        host text NOT NULL,
        day date NOT NULL,
        started_at timestamptz NOT NULL,
        ended_at timestamptz,
        problems text[] NOT NULL DEFAULT '{}',
        unknown text[] NOT NULL DEFAULT '{}',
        num_waiting bigint NOT NULL DEFAULT 0,
        PRIMARY KEY (host, day)
    )
"""


def upgrade() -> None:
    op.execute(TABLE)
    share("reconciliations", readable=False)


def downgrade() -> None:
    open_wall("reconciliations")
    op.execute("DROP TABLE reconciliations")
