"""Several queries in one statement give what each gives alone."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.queries import Query, ask, ask_all

NOON = datetime(2030, 5, 10, 12, tzinfo=UTC)


def query(*rows: str, **columns: Any) -> Query[list[dict[str, Any]]]:
    """Return a query of rows in SQL, in the order of their first column, downwards."""
    values = ", ".join(f"({row})" for row in rows)
    names = ", ".join(columns)
    text = sa.text(f"SELECT * FROM (VALUES {values}) AS v ({names}) ORDER BY 1 DESC LIMIT 3")
    typed = [sa.column(name, kind) for name, kind in columns.items()]
    return Query(text.columns(*typed), lambda found: [dict(row._mapping) for row in found])


NUMBERS = query("1, 'a', 1.5", "3, NULL, 10::numeric ^ 30", "2, 'b', 0",
                n=sa.BigInteger, name=sa.Text, amount=sa.Numeric)  # fmt: skip
OTHERS = query(
    "TIMESTAMPTZ '2030-05-10 12:00Z', '[1, null]'::json, '{\"a\": [2]}'::jsonb, ARRAY['x'], 7",
    n=sa.DateTime(timezone=True),
    listed=JSON,
    mapped=JSONB,
    texts=ARRAY(sa.Text),
    amount=sa.Integer,
)
NOTHING = Query(sa.select(sa.literal(1).label("n")).where(sa.false()), lambda rows: len(rows))


async def test_each_query_has_its_own_rows_types_and_order(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        numbers, nothing, others = await ask_all(conn, NUMBERS, NOTHING, OTHERS)
        assert [numbers, nothing, others] == [
            await ask(conn, q) for q in (NUMBERS, NOTHING, OTHERS)
        ]
    assert [row["n"] for row in numbers] == [3, 2, 1]
    assert [row["amount"] for row in numbers] == [Decimal(10**30), Decimal(0), Decimal("1.5")]
    assert numbers[0]["name"] is None and nothing == 0
    own = {"n": NOON, "listed": [1, None], "mapped": {"a": [2]}, "texts": ["x"], "amount": 7}
    assert others == [own]


async def test_a_query_may_refuse_its_rows(db: AsyncEngine) -> None:
    def read(rows: Any) -> None:
        raise LookupError

    async with db.connect() as conn:
        with pytest.raises(LookupError):
            await ask_all(conn, NUMBERS, Query(NUMBERS.select, read))
