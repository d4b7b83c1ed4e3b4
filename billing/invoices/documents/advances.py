"""Read an org's advance payments, and the parts of them that expired or were revoked. The amounts
that credits pay are with the invoices that they settle."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.transfers import GRANT_PREFIX
from billing.money import Pico
from billing.tables import read_struct


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
    """Return all advances in the order of their posting."""
    rows = await conn.execute(_ADVANCES, {"org_id": org_id})
    return [read_struct(Advance, row, org_id=org_id) for row in rows]
