"""Keep settings that operators make by API, their number, and who has them in force.

Revision ID: 0062
Revises: 0061
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0062"
down_revision = "0061"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE installation_items (
        kind text NOT NULL CHECK (kind IN ('model', 'mcp_server', 'price_book', 'deadlines')),
        name text NOT NULL,
        content jsonb NOT NULL,
        home text,
        sealed bytea,
        secret_id text,
        version bigint NOT NULL DEFAULT 1,
        created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (kind, name),
        CHECK ((sealed IS NULL) = (secret_id IS NULL))
    )
    """,
    """
    CREATE TABLE installation_generation (
        "only" boolean PRIMARY KEY CHECK ("only"),
        number bigint NOT NULL
    )
    """,
    """
    CREATE TABLE installation_homes (
        home text PRIMARY KEY,
        number bigint NOT NULL,
        problem text NOT NULL,
        file_names jsonb NOT NULL,
        seen_at timestamptz NOT NULL
    )
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    share("installation_items", readable=False, delete=True)
    share("installation_generation", readable=False)
    share("installation_homes", readable=False, delete=True)


def downgrade() -> None:
    for name in ("items", "generation", "homes"):
        op.execute(f"DROP TABLE installation_{name}")
