"""What an org has paid in advance: transfers from the house's cash to its receivable.

Above: the gateway's `tenancy.credits`. Below: `ledger`, `tables`. Knows no cap: whoever may spend
no more than that is held to it before a token is made, by the limiter.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger import CASH, POST_LEGS
from billing.money import Pico
from billing.tables import balances, transfers

_CREDIT = sa.text(f"""
    WITH legs AS (
        SELECT CAST(:id AS text) AS id, CAST(NULL AS text) AS event_id, '{CASH}' AS debit,
            CAST(:account AS text) AS credit, CAST(:amount AS numeric) AS amount_pico,
            'credit' AS kind, CAST(NULL AS text) AS corrects, now() AS admitted_at
        WHERE NOT EXISTS (SELECT FROM transfers WHERE id = :id)
    ),
    {POST_LEGS}
    SELECT count(*) FROM legs
""")


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    amount_pico: Pico
    posted_at: datetime


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    credited_pico: Pico
    spent_pico: Pico
    """As far as the books have it."""


def account_of(org: str) -> str:
    return f"receivable:{org}"


async def post_credit(
    conn: AsyncConnection, *, credit_id: str, org: str, amount_pico: Pico
) -> Credit:
    """In the caller's transaction; of one id once."""
    named = {"id": credit_id, "account": account_of(org), "amount": amount_pico}
    await conn.execute(_CREDIT, named)
    found = await conn.execute(credits_of(org).where(transfers.c.id == credit_id))
    return to_credit(found.one())


def credits_of(org: str) -> sa.Select[Any]:
    own = transfers.c
    found = sa.select(own.id, own.amount_pico, own.posted_at)
    return found.where(own.kind == "credit", own.credit == account_of(org))


def to_credit(row: sa.Row[Any]) -> Credit:
    return Credit(id=row.id, amount_pico=int(row.amount_pico), posted_at=row.posted_at)


async def balance_of(conn: AsyncConnection, org: str) -> Balance:
    found = sa.select(balances).where(balances.c.account == account_of(org))
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        return Balance(credited_pico=0, spent_pico=0)
    return Balance(credited_pico=int(row.credits_pico), spent_pico=int(row.debits_pico))


def credited(org: sa.ColumnElement[str]) -> sa.ScalarSelect[Any]:
    """SQL: what the org of this row has been credited; NULL: nothing."""
    found = sa.select(balances.c.credits_pico)
    found = found.where(balances.c.account == sa.literal("receivable:") + org)
    return found.correlate_except(balances).scalar_subquery()
