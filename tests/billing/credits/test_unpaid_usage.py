"""Usage that can be paid is paid, whatever waits before it: usage of an org behind usage that no
credit of it pays for, and orgs behind those that cannot be settled."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits import lines as credit_lines
from billing.credits import unpaid_usage as unpaid
from billing.credits.grants import burn
from billing.credits.grants_admin import grant_credit
from billing.credits.lines import SweepCursor, open_grants, sweep
from billing.credits.unpaid_usage import oldest_unpaid
from billing.events import Price, PriceSet, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.ledger.accounts import account_of
from billing.ledger.transfers import Transfer, transfer
from billing.reconciliation.checks import check_credits
from billing.tables import EPOCH, unpaid_usage
from tests.billing.samples import an_attempt, an_event

PRICES: PriceSet = {"uncached_input": Price("in", 3), "output": Price("out", 5)}
NOW = datetime.now().astimezone()
LATER = NOW + timedelta(days=1)
TERMS: list[dict[str, object]] = [
    {},
    {"models": ["m"]},
    {"components": ["output", "cache_read"]},
    {"expires_at": NOW},
    {"models": ["m", "n"], "components": ["uncached_input"], "expires_at": LATER},
]
USED = [Quantities(output=1), Quantities(uncached_input=1), Quantities(uncached_input=1, output=1)]
numbers = itertools.count(1)


def an_usage(org: str, *, model: str = "m", at: datetime = NOW, used: Quantities) -> UsageEvent:
    """In the order in which they are made."""
    attempt_id = str(UUID(int=next(numbers)))
    admitted_at = (at - EPOCH).total_seconds()
    attempt = an_attempt(attempt_id, org=org, model=model, prices=PRICES, admitted_at=admitted_at)
    return an_event(attempt, used)


async def credit(db: AsyncEngine, org: str, amount: int = 100, **terms: object) -> None:
    async with db.begin() as conn:
        await grant_credit(conn, credit_id=f"g_{org}", org=org, amount_pico=amount, **terms)  # type: ignore[arg-type]


async def waiting(db: AsyncEngine) -> list[str]:
    """Return the orgs whose usage is unpaid, in its order."""
    async with db.connect() as conn:
        own = unpaid_usage.c
        return list(await conn.scalars(sa.select(own.org_id).order_by(own.transfer_id)))


async def test_what_is_looked_at_is_what_some_credit_pays_something_of(db: AsyncEngine) -> None:
    """The rule in SQL, and the one that burns credits."""
    for number, terms in enumerate(TERMS):
        org = f"org_{number}"
        await credit(db, org, **terms)
        await ingest(
            db,
            [
                an_usage(org, model=model, at=at, used=used)
                for model in ("m", "other")
                for at in (NOW - timedelta(hours=1), NOW)
                for used in (*USED, Quantities(output=7))
            ],
        )
    async with db.begin() as conn:
        # Of some a part is paid, nobody knows of which component.
        await conn.execute(
            sa.text("UPDATE unpaid_usage SET amount_pico = 34 WHERE amount_pico = 35")
        )
        sizes = set()
        for number in range(len(TERMS)):
            org = f"org_{number}"
            everything, _ = await oldest_unpaid(conn, org, is_prepaid=False)
            payable, events = await oldest_unpaid(conn, org, is_prepaid=True)
            [grant] = await open_grants(conn, org)
            assert payable == [each for each in everything if burn([grant], [each])]
            assert events.keys() == {each.transfer_id for each in payable}
            assert len(everything) == 16
            sizes.add(len(payable))
    assert sizes == {16, 8, 4}


async def test_what_nobody_pays_keeps_nothing_waiting_behind_it(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpaid, "MAX_AT_ONCE", 3)
    await credit(db, "org_a", models=["n"])
    await ingest(db, [an_usage("org_a", model="m", used=USED[0]) for _ in range(7)])
    await ingest(db, [an_usage("org_a", model="n", used=USED[0]) for _ in range(4)])
    assert [await sweep(db) for _ in range(3)] == [1, 1, 0], "what nobody pays is not due"
    assert len(await waiting(db)) == 7
    assert await check_credits(db) == []


async def test_orgs_that_cannot_be_settled_keep_no_other_one_waiting(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because somebody holds their line, or because their books are broken."""
    monkeypatch.setattr(credit_lines, "SWEEP_BATCH", 2)
    orgs = [f"org_{letter}" for letter in "abcde"]
    for org in orgs:
        await credit(db, org)
        await ingest(db, [an_usage(org, used=USED[0])])
    in_the_way = Transfer(
        id="burn:org_d:1:g_org_d",
        debit="house:cash",
        credit=account_of("org_d"),
        amount_pico=1,
        kind="burn",
    )
    async with db.begin() as conn:
        await transfer(conn, [in_the_way])
    cursor, held = (
        SweepCursor(),
        sa.text("SELECT FROM credit_lines WHERE org_id < 'org_d' FOR UPDATE"),
    )
    async with db.begin() as conn:
        await conn.execute(held)
        assert [await sweep(db, cursor), cursor.org_id] == [2, "org_b"]
        with pytest.raises(AssertionError):
            await sweep(db, cursor)
        assert await waiting(db) == orgs
        assert [await sweep(db, cursor), cursor.org_id] == [1, ""]
        assert await waiting(db) == orgs[:4]
    assert [await sweep(db, cursor), cursor.org_id] == [2, "org_b"], "from the beginning"
    assert await waiting(db) == ["org_c", "org_d"]
