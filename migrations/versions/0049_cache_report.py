"""Count what of prompts came from the cache, hour by hour, and what broke their prefixes.

Revision ID: 0049
Revises: 0048
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None

CAUSES = (
    "intact",
    "first",
    "changed",
    "evicted",
    "restarted",
    "other_replica",
    "not_kept",
    "unmarked",
    "too_short",
    "unknown",
)


def upgrade() -> None:
    counts = "".join(f"num_{cause} bigint NOT NULL," for cause in CAUSES)
    op.execute(
        f"""
        CREATE TABLE cache_report (
            org text NOT NULL,
            hour timestamptz NOT NULL,
            project text NOT NULL,
            key text NOT NULL,
            model text NOT NULL,
            prefix_kind text NOT NULL,
            prefix text NOT NULL,
            num_requests bigint NOT NULL,
            input_tokens bigint NOT NULL,
            cached_tokens bigint NOT NULL,
            {counts}
            breaks jsonb NOT NULL,
            PRIMARY KEY (org, hour, project, key, model, prefix_kind, prefix)
        ) WITH (fillfactor = 70)
        """
    )
    op.execute("CREATE INDEX cache_report_age ON cache_report (hour)")
    protect("cache_report", "org", read_only=True, delete=True)


def downgrade() -> None:
    open_wall("cache_report")
    op.execute("DROP TABLE cache_report")
