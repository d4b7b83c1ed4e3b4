"""A top-up that has expired, and the one that was asked for in its place: whoever pays which of
them and when, at most one is granted."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.balance import balance_of
from billing.credits.balance_watch import AutoTopUp, BalanceSettings, set_settings
from billing.credits.grants_admin import grant_credit
from billing.credits.lines import sweep
from billing.credits.top_ups import TopUp
from billing.money import PICO_PER_USD
from billing.tables import top_ups
from gateway.audit.log import Actor
from gateway.tenancy.money.top_ups import TopUpEnded, TopUpSuperseded, fail_top_up, grant_top_up

ORG = "org_a"
CENT, USD = PICO_PER_USD // 100, PICO_PER_USD
WISH = BalanceSettings(top_up=AutoTopUp(amount_pico=5 * USD, below_pico=USD, max_per_day=9))
BY = {
    "org_id": ORG,
    "operator_org": ORG,
    "actor": Actor(kind="system", id="test"),
    "check": lambda _: None,
}


@pytest.fixture
async def first(db: AsyncEngine) -> str:
    """Return the top-up of an org with a cent; it has expired."""
    async with db.begin() as conn:
        made = "INSERT INTO orgs (id, name, prepaid) VALUES (:id, 'a', true)"
        await conn.execute(sa.text(made), {"id": ORG})
        await grant_credit(conn, credit_id="credit_0", org=ORG, amount_pico=CENT)
        await set_settings(conn, ORG, WISH)
        await conn.execute(sa.update(top_ups).values(expires_at=sa.func.now()))
    await sweep(db)
    [found] = await asked(db)
    return found


@pytest.fixture
async def second(db: AsyncEngine, first: str) -> str:
    """Asked for since, because the auto top-up was switched off and on."""
    async with db.begin() as conn:
        await set_settings(conn, ORG, BalanceSettings())
        await set_settings(conn, ORG, WISH)
    [found] = set(await asked(db)) - {first}
    return found


async def asked(db: AsyncEngine) -> list[str]:
    async with db.connect() as conn:
        return list(await conn.scalars(sa.select(top_ups.c.id)))


async def left(db: AsyncEngine) -> int:
    async with db.connect() as conn:
        return (await balance_of(conn, ORG)).left_pico


async def grant(db: AsyncEngine, top_up_id: str) -> TopUp:
    return await grant_top_up(db, top_up_id, **BY)  # type: ignore[arg-type]


async def test_who_pays_late_has_paid_where_nothing_was_asked_for_since(
    db: AsyncEngine, first: str
) -> None:
    for _ in range(2):
        assert (await grant(db, first)).state == "granted"
    assert await left(db) == CENT + 5 * USD, "once"


async def test_in_whose_place_another_was_asked_for_that_one_is_granted(
    db: AsyncEngine, first: str, second: str
) -> None:
    for _ in range(2):  # before the other is paid, and after
        with pytest.raises(TopUpSuperseded, match=second) as refused:
            await grant(db, first)
        assert refused.value.param == "top_up_id" and second not in refused.value.detail
        assert (await grant(db, second)).state == "granted"
    assert await left(db) == CENT + 5 * USD


async def test_where_the_other_has_failed_the_one_before_can_be_paid(
    db: AsyncEngine, first: str, second: str
) -> None:
    await fail_top_up(db, second, "card declined", **BY)  # type: ignore[arg-type]
    assert (await grant(db, first)).state == "granted"
    with pytest.raises(TopUpEnded):
        await grant(db, second)
    assert await left(db) == CENT + 5 * USD
