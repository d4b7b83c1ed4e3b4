"""How many requests of a rollup made embeddings, for the report of these.

What stands is counted anew from its events, which are all kept, so old hours and days are exact,
too. Of a tag that a budget
named in the middle of a day the requests before that, which are in "(other)", are counted as its.

Revision ID: 0055
Revises: 0054
"""

from __future__ import annotations

from alembic import op

revision = "0055"
down_revision = "0054"
branch_labels = None
depends_on = None

TABLES = ("usage_hourly", "usage_daily", "usage_tags_daily")
_PLACE = "project, key, model, tier"
_MADE = f"""
    SELECT id, org, {_PLACE}, lane = 'batch' AS batch, admitted_at
    FROM usage_events WHERE kind = 'usage' AND embedding_input > 0
"""


def _of(unit: str) -> str:
    return f"""
        SELECT org, date_trunc('{unit}', admitted_at, 'UTC') AS {unit}, {_PLACE}, batch,
            count(*) AS num_embeddings
        FROM ({_MADE}) made GROUP BY org, 2, {_PLACE}, batch
    """


def _count(table: str, unit: str) -> str:
    return f"""
        UPDATE {table} r SET num_embeddings = e.num_embeddings FROM ({_of(unit)}) e
        WHERE (r.org, r.{unit}, r.project, r.key, r.model, r.tier, r.batch)
            = (e.org, e.{unit}, e.project, e.key, e.model, e.tier, e.batch)
    """


_OF_TAGS = f"""
    SELECT m.org, m.day, coalesce(k.tag, '(other)') AS tag, coalesce(v.value, '(other)') AS value,
        {_PLACE}, batch, count(*) AS num_embeddings
    FROM (SELECT *, date_trunc('day', admitted_at, 'UTC') AS day FROM ({_MADE}) made) m
        JOIN event_tags g ON g.event_id = m.id
        CROSS JOIN LATERAL jsonb_each_text(g.tags) AS t(tag, value)
        LEFT JOIN (SELECT DISTINCT org, day, tag FROM usage_tags) k
            ON (k.org, k.day, k.tag) = (m.org, m.day, t.tag)
        LEFT JOIN usage_tags v ON (v.org, v.day, v.tag, v.value) = (m.org, m.day, t.tag, t.value)
    GROUP BY m.org, m.day, 3, 4, {_PLACE}, batch
"""
BACKFILL = (
    _count("usage_hourly", "hour"),
    _count("usage_daily", "day"),
    f"""
        UPDATE usage_tags_daily r SET num_embeddings = e.num_embeddings FROM ({_OF_TAGS}) e
        WHERE (r.org, r.day, r.tag, r.value, r.project, r.key, r.model, r.tier, r.batch)
            = (e.org, e.day, e.tag, e.value, e.project, e.key, e.model, e.tier, e.batch)
    """,
)


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} ADD COLUMN num_embeddings bigint NOT NULL DEFAULT 0")
    for statement in BACKFILL:
        op.execute(statement)


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} DROP COLUMN num_embeddings")
