"""The daily rollup: what a report by days reads, a twenty-fourth of the hours.

Written in the statement that writes the hours, so the two agree whenever anybody looks.

Revision ID: 0025
Revises: 0024
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import text

from migrations.walls import open_wall, protect

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

KEY = ("org", "day", "project", "key", "model", "tier", "batch")
COUNTED = text("""
    SELECT attname FROM pg_attribute
    WHERE attrelid = 'usage_daily'::regclass AND attnum > 0 AND NOT attisdropped
        AND NOT attname = ANY (:key)
    ORDER BY attnum
""")


def upgrade() -> None:
    op.execute("CREATE TABLE usage_daily (LIKE usage_hourly INCLUDING ALL)")
    op.execute("ALTER TABLE usage_daily RENAME COLUMN hour TO day")
    counted = op.get_bind().scalars(COUNTED, {"key": list(KEY)}).all()
    op.execute(f"""
        INSERT INTO usage_daily ({", ".join((*KEY, *counted))})
        SELECT org, date_trunc('day', hour, 'UTC') AS day, project, key, model, tier, batch,
            {", ".join(f"sum({name})" for name in counted)}
        FROM usage_hourly GROUP BY {", ".join(KEY)}
    """)
    protect("usage_daily", "org", read_only=True)


def downgrade() -> None:
    open_wall("usage_daily")
    op.execute("DROP TABLE usage_daily")
