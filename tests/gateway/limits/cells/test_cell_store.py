"""Postgres keeps the shares of cells: of two decisions at once one is made."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.shares import DEFAULT, WHOLE, ShareDecision, decide, equal_shares
from gateway.limits.cells.store import CellStore, SharesUnknown

SCOPE = "tollgate:{org_a}:org:org_a"
OLD = sa.text("UPDATE cell_shares SET decided_at = decided_at - interval '1 minute'")
ALL = sa.text("TRUNCATE cell_shares, cell_demands")


@pytest.fixture
async def store(db: AsyncEngine) -> CellStore:
    async with db.begin() as conn:
        await conn.execute(ALL)
    return CellStore(db)


async def begin(store: CellStore, db: AsyncEngine) -> None:
    first = equal_shares(dict.fromkeys(["eu", "us"]))
    begun = ShareDecision(version=1, shares=first, before=first, moves_left=WHOLE, age_s=0.0)
    await asyncio.gather(store.begin(begun), store.begin(begun))
    async with db.begin() as conn:
        await conn.execute(OLD)


async def test_what_gateways_tell_is_added_up_by_cell(store: CellStore) -> None:
    await asyncio.gather(*(store.exchange("eu", {SCOPE: 0.25}) for _ in range(4)))
    found = await store.exchange("us", {SCOPE: 0.5})
    assert {key: each.asked for key, each in found.demands.items()} == {
        (SCOPE, "eu"): 1.0,
        (SCOPE, "us"): 0.5,
        (DEFAULT, "eu"): 0.0,
        (DEFAULT, "us"): 0.0,
    }
    assert all(0 <= each.silent_s < 60 for each in found.demands.values())
    assert found.decisions == {}


async def test_one_of_two_decisions_is_made(store: CellStore, db: AsyncEngine) -> None:
    await begin(store, db)
    last = (await store.exchange("eu", {})).decisions[DEFAULT]
    following = decide(last, {"us": 0.0})
    assert following is not None and following.shares == {"us": WHOLE}
    made = await asyncio.gather(*(store.replace(DEFAULT, following) for _ in range(3)))
    assert sorted(made) == [False, False, True]
    found = (await store.exchange("eu", {})).decisions[DEFAULT]
    assert (found.version, found.shares, found.before) == (2, following.shares, last.shares)
    assert found.age_s < 60


async def test_a_scope_opens_with_the_shares_of_all_and_closes_with_them(
    store: CellStore, db: AsyncEngine
) -> None:
    await begin(store, db)
    of_all = (await store.exchange("eu", {SCOPE: 1.0})).decisions[DEFAULT]
    await store.open([SCOPE], of_all.version + 1)
    assert SCOPE not in (await store.exchange("eu", {})).decisions
    await store.open([SCOPE], of_all.version)
    opened = (await store.exchange("eu", {})).decisions[SCOPE]
    assert (opened.version, opened.shares) == (1, of_all.shares)
    await store.close(SCOPE, opened.version + 1, of_all.version)
    assert SCOPE in (await store.exchange("eu", {})).decisions
    await store.close(SCOPE, opened.version, of_all.version)
    found = await store.exchange("eu", {})
    assert SCOPE not in found.decisions
    assert not [scope for scope, _ in found.demands if scope == SCOPE]


async def test_no_scope_opens_while_the_shares_of_all_move(
    store: CellStore, db: AsyncEngine
) -> None:
    await begin(store, db)
    of_all = (await store.exchange("eu", {})).decisions[DEFAULT]
    following = decide(of_all, {"us": 0.0})
    assert following is not None and await store.replace(DEFAULT, following)
    await store.open([SCOPE], following.version)
    assert SCOPE not in (await store.exchange("eu", {})).decisions


async def test_more_scopes_than_are_read_are_no_shares(
    store: CellStore, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(store, db)
    await store.exchange("eu", {})
    monkeypatch.setattr("gateway.limits.cells.store.MAX_READ", 1)
    with pytest.raises(SharesUnknown):
        await store.exchange("eu", {})


async def test_a_forgotten_cell_is_gone(store: CellStore, db: AsyncEngine) -> None:
    await store.exchange("eu", {SCOPE: 1.0})
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE cell_demands SET heard_at = now() - interval '2 h'"))
    await store.forget()
    assert [cell for _, cell in (await store.exchange("us", {})).demands] == ["us"]


async def test_a_gateway_has_its_part_as_soon_as_it_has_started(store: CellStore) -> None:
    budgets = CellBudgets("eu", store)
    await budgets.start()
    try:
        assert budgets.part(SCOPE, 600, asyncio.get_running_loop().time()) == 600
    finally:
        await budgets.close()


class Heard:
    def __init__(self) -> None:
        self.num_heard = self.num_supposed = 0

    def suppose_everything(self) -> None:
        self.num_supposed += 1


async def test_what_is_announced_in_one_cell_is_heard_of_in_the_others(store: CellStore) -> None:
    eu, us = Heard(), Heard()
    of_eu = CellBudgets("eu", store, announcements=eu)
    of_us = CellBudgets("us", store, announcements=us)
    for each in (of_eu, of_us, of_eu, of_us):
        await each.exchange()
    eu.num_heard, eu.num_supposed, us.num_supposed = 1, 0, 0
    await of_eu.exchange()
    await of_us.exchange()
    await of_eu.exchange()
    await of_us.exchange()
    assert (eu.num_supposed, us.num_supposed) == (0, 1)
