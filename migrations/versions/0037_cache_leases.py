"""Leases on cached prefixes, and the writes that they have to stand for.

Revision ID: 0037
Revises: 0036
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

TABLES = {
    "cache_leases": """
        id text PRIMARY KEY,
        org_id text NOT NULL,
        event_id text NOT NULL,
        model text NOT NULL,
        engine text NOT NULL,
        engine_id text NOT NULL,
        ttl text NOT NULL CONSTRAINT cache_leases_ttl CHECK (ttl IN ('5m', '1h')),
        num_tokens bigint NOT NULL CONSTRAINT cache_leases_tokens CHECK (num_tokens > 0),
        end_tokens bigint NOT NULL,
        prefix bytea NOT NULL,
        granted_at timestamptz NOT NULL,
        kept_until timestamptz NOT NULL,
        ended_at timestamptz,
        outcome text CONSTRAINT cache_leases_outcome CHECK (
            outcome IN ('kept', 'evicted', 'engine_lost', 'recomputed', 'unrecorded')),
        refund_id text UNIQUE,
        refunded_pico numeric(38,0) CONSTRAINT cache_leases_refunded CHECK (
            refunded_pico IS NULL OR (refunded_pico >= 0 AND outcome <> 'kept')),
        CONSTRAINT cache_leases_ended CHECK ((ended_at IS NULL) = (outcome IS NULL)),
        CONSTRAINT cache_leases_refund CHECK ((refund_id IS NULL) = (refunded_pico IS NULL))
    """,
    # What was booked lately, until it is known that leases stand for it.
    "cache_writes": """
        event_id text PRIMARY KEY,
        org_id text NOT NULL,
        booked_at timestamptz NOT NULL DEFAULT now()
    """,
}
INDEXES = (
    "CREATE INDEX cache_leases_event ON cache_leases (event_id)",
    "CREATE INDEX cache_leases_of_org ON cache_leases (org_id, id)",
    "CREATE INDEX cache_leases_open ON cache_leases (engine, kept_until) WHERE ended_at IS NULL",
    "CREATE INDEX cache_leases_owed ON cache_leases (id)"
    " WHERE refunded_pico IS NULL AND outcome <> 'kept'",
    "CREATE INDEX cache_writes_booked ON cache_writes (booked_at)",
)


def upgrade() -> None:
    for table, columns in TABLES.items():
        op.execute(f"CREATE TABLE {table} ({columns})")
        protect(table, read_only=True, delete=table == "cache_writes")
    for index in INDEXES:
        op.execute(index)


def downgrade() -> None:
    for table in reversed(TABLES):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
