"""Read what an org has paid in advance, and what became of it without an invoice: of each credit
that it was given, that it expired, or was taken back.

What a credit pays stands with the invoices that it settles.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.transfers import GRANT_PREFIX
from billing.money import Pico


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    kind: Literal["credit", "expired", "revoked"]
    amount_pico: Pico
    posted_at: datetime


_ADVANCES = sa.text(f"""
    SELECT t.id, t.kind, t.amount_pico, t.posted_at
    FROM credit_grants g JOIN transfers t ON t.id = g.id AND t.kind = 'credit'
    WHERE g.org_id = :org_id
    UNION ALL
    SELECT t.id, t.kind, t.amount_pico, t.posted_at
    FROM credit_grants g JOIN transfers t ON t.debit = '{GRANT_PREFIX}' || g.id
    WHERE g.org_id = :org_id AND t.kind IN ('expired', 'revoked')
    ORDER BY posted_at, id
""")


async def read_advances(conn: AsyncConnection, *, org_id: str) -> list[Advance]:
    """In order."""
    return [
        Advance(
            id=row.id,
            org_id=org_id,
            kind=row.kind,
            amount_pico=int(row.amount_pico),
            posted_at=row.posted_at.astimezone(UTC),
        )
        for row in await conn.execute(_ADVANCES, {"org_id": org_id})
    ]
