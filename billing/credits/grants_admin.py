"""Create, revoke and list an org's credits. Each is a grant with an account of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.balance_leases import account
from billing.credits.balance_watch import hold_line, watch
from billing.credits.grants import DEFAULT_PRIORITY, GrantTerms, burn_order
from billing.credits.lines import open_line
from billing.ledger.accounts import CASH, account_of
from billing.ledger.transfers import GOOD, GRANT_PREFIX, Transfer, transfer
from billing.money import Pico
from billing.tables import balances, credit_burns, credit_grants, read_struct, transfers


class Credit(GrantTerms, frozen=True, kw_only=True):
    """A grant as an admin sees it."""

    org_id: str
    amount_pico: Pico
    left_pico: Pico
    """Neither paid nor leased."""
    leased_pico: Pico
    ended_at: datetime | None


async def grant_credit(
    conn: AsyncConnection,
    *,
    credit_id: str,
    org: str,
    amount_pico: Pico,
    priority: int = DEFAULT_PRIORITY,
    expires_at: datetime | None = None,
    models: Sequence[str] | None = None,
    components: Sequence[str] | None = None,
) -> Credit:
    """Grant a credit, in the caller's transaction. Idempotent by its id."""
    await open_line(conn, org)
    await hold_line(conn, org)
    terms = {
        "id": credit_id,
        "org_id": org,
        "amount_pico": amount_pico,
        "priority": priority,
        "expires_at": expires_at,
        "models": models,
        "components": components,
        "created_at": sa.func.now(),
    }
    await conn.execute(insert(credit_grants).values(terms).on_conflict_do_nothing())
    paid = Transfer(
        id=credit_id, debit=CASH, credit=account(credit_id), amount_pico=amount_pico, kind="credit"
    )
    (status,) = await transfer(conn, [paid])
    assert status in GOOD, status
    await watch(conn, org, rearms=True)
    made = await find_credit(conn, org, credit_id)
    assert made is not None
    return made


async def revoke_credit(conn: AsyncConnection, org: str, credit_id: str) -> None:
    """Revoke a credit; idempotent. The free part goes back with the next settlement, the leased
    part when its lease ends."""
    await hold_line(conn, org)
    own = credit_grants.c
    taken = sa.update(credit_grants).where(own.org_id == org, own.id == credit_id)
    await conn.execute(taken.where(own.revoked_at.is_(None)).values(revoked_at=sa.func.now()))
    await watch(conn, org)


def credits_of(org: str) -> sa.Select[Any]:
    """Return the query of an org's credits, for `to_credit`."""
    own = balances.c
    left = own.credits_pico - own.debits_pico - own.pending_debits_pico
    found = sa.select(
        credit_grants,
        sa.func.coalesce(left, 0).label("left_pico"),
        sa.func.coalesce(own.pending_debits_pico, 0).label("leased_pico"),
    )
    joined = sa.literal(GRANT_PREFIX) + credit_grants.c.id == own.account
    return found.outerjoin(balances, joined).where(credit_grants.c.org_id == org)


def to_credit(row: sa.Row[Any]) -> Credit:
    return read_struct(Credit, row)


async def find_credit(conn: AsyncConnection, org: str, credit_id: str) -> Credit | None:
    found = await conn.execute(credits_of(org).where(credit_grants.c.id == credit_id))
    row = found.one_or_none()
    return to_credit(row) if row is not None else None


async def open_credits(conn: AsyncConnection, org: str) -> list[Credit]:
    """Return the credits with something left, in the order in which they pay."""
    found = credits_of(org).where(credit_grants.c.ended_at.is_(None))
    return sorted((to_credit(row) for row in await conn.execute(found)), key=burn_order)


async def count_open(conn: AsyncConnection, org: str) -> int:
    own = credit_grants.c
    found = sa.select(sa.func.count()).where(own.org_id == org, own.ended_at.is_(None))
    return await conn.scalar(found) or 0


async def paid_pico(conn: AsyncConnection, org: str) -> Pico:
    """Return the amount that credits have paid of the org's receivable. Credits that are older than
    grants paid it at once."""
    burned = sa.select(sa.func.coalesce(sa.func.sum(credit_burns.c.amount_pico), 0))
    burned = burned.where(credit_burns.c.org_id == org)
    at_once = sa.select(sa.func.coalesce(sa.func.sum(transfers.c.amount_pico), 0))
    at_once = at_once.where(transfers.c.kind == "credit", transfers.c.credit == account_of(org))
    found = sa.select(burned.scalar_subquery() + at_once.scalar_subquery())
    return int((await conn.execute(found)).scalar_one())
