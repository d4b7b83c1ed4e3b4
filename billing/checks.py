"""What is wrong with the books, as queries that should find nothing.

Knows no table.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine


async def complaints(queries: Mapping[str, str], db: AsyncEngine) -> list[str]:
    """Of one moment. `queries`: by complaint, SQL for the names of those it is true of."""
    problems: list[str] = []
    async with db.connect() as conn:
        await conn.execution_options(isolation_level="REPEATABLE READ")
        for complaint, query in queries.items():
            found = await conn.execute(sa.text(query))
            problems.extend(f"{name}: {complaint}" for (name,) in found)
    return problems
