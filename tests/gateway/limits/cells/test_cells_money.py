"""Cells share hard caps and balances: each has an equal part of what the books say is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.limits import counter_refresh, funding
from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.shares import DEFAULT, divided, equal_shares
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Units
from tests.gateway.limits.cells.world_of_cells import StoreInMemory, World
from tests.gateway.limits.money.money_books import BooksOfATest, who
from tests.gateway.limits.money.test_funding import Gateway, credit
from tests.gateway.limits.money.test_limiter_money import NOON, LimitedGateway, cap

CELLS = equal_shares(dict.fromkeys(["eu", "us"]))
AMOUNT = 600_000
TOKENS = 1_000
COST = TOKENS * 3
"""Nano-USD of an input of so many tokens."""


class EqualPart(CellBudgets):
    """Has half of everything."""

    def part(self, key: str, amount: int, now: float) -> int:
        return divided(amount, CELLS)[self.cell]

    async def start(self) -> None:
        return None


def half_of_all(cell: str) -> EqualPart:
    return EqualPart(cell, StoreInMemory(World()))


class CellOfATest(LimitedGateway):
    """One that knows nothing of the other but what the books say."""

    async def hold(self) -> list[Admission]:
        """Admit what is to be had."""
        found: list[Admission] = []
        while isinstance(one := await self.ask(who(cap(AMOUNT)), TOKENS, 0), Admission):
            found.append(one)
        return found

    async def end(self, admission: Admission) -> None:
        used = Units(input_tokens=TOKENS, cost_nano=COST)
        await self.limiter.settle(admission, used)
        done = self.books.ingest(admission.lease_id, "key_a", COST, NOON)
        await self.limiter.counters.book([done])


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[list[redis.asyncio.Redis]]:
    """Two keyspaces, of which neither knows the other."""
    server = redis_url.partition("?")[0]
    made = [redis.asyncio.from_url(f"{server}?db={number}") for number in (0, 1)]
    await made[1].flushdb()
    yield made
    await made[1].flushdb()
    for each in made:
        await each.aclose()


@pytest.fixture
async def cells(stores: list[redis.asyncio.Redis]) -> AsyncIterator[list[CellOfATest]]:
    books = BooksOfATest()
    made = [
        CellOfATest(store, books, cells=half_of_all(name))
        for name, store in zip(("eu", "us"), stores, strict=True)
    ]
    yield made
    for each in made:
        await each.limiter.close()


def ask_the_books_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REFRESHED_S", "AFTER_REFUSAL_S"):
        monkeypatch.setattr(counter_refresh, name, 0.0)


async def test_both_at_once_hold_one_cap(cells: list[CellOfATest]) -> None:
    held = await asyncio.gather(*(each.hold() for each in cells))
    assert [len(each) for each in held] == [AMOUNT // 2 // COST] * 2


async def test_what_is_not_used_in_one_is_there_for_the_other(
    cells: list[CellOfATest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_the_books_each_time(monkeypatch)
    eu, _ = cells
    spent = 0
    for _ in range(8):
        for each in await eu.hold():
            await eu.end(each)
            spent += COST
    assert AMOUNT * 97 // 100 < spent <= AMOUNT


async def test_after_a_refusal_the_books_are_asked_sooner(
    cells: list[CellOfATest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counter_refresh, "AFTER_REFUSAL_S", 0.0)
    eu, _ = cells
    held = await eu.hold()
    for each in held:
        await eu.end(each)
    assert await eu.hold()


async def test_what_others_have_spent_is_known_before_anything_is_admitted(
    cells: list[CellOfATest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_the_books_each_time(monkeypatch)
    eu, us = cells
    await us.admitted(who(cap(AMOUNT)), TOKENS, 0)
    for number in range(AMOUNT // COST):
        eu.books.ingest(f"of-eu-{number}", "key_a", COST, NOON)
    refused = await us.refused(who(cap(AMOUNT)), TOKENS, 0)
    assert refused.left_nano == 0


async def test_books_that_cannot_be_asked_leave_a_cell_what_it_had(
    cells: list[CellOfATest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_the_books_each_time(monkeypatch)
    eu, _ = cells
    await eu.admitted(who(cap(AMOUNT)), TOKENS, 0)

    async def away(*args: object) -> tuple[float, list[int]]:
        raise OSError("away")

    monkeypatch.setattr(eu.books, "spent", away)
    held = await eu.hold()
    assert 1 + len(held) == AMOUNT // 2 // COST


async def test_both_at_once_hold_one_balance(
    db: AsyncEngine, stores: list[redis.asyncio.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(funding, "TOP_UP_TIMEOUT_S", 60.0)
    await credit(db, "one", 100)
    made = []
    for name, store in zip(("eu", "us"), stores, strict=True):
        gateway = Gateway(db, store)
        gateway.limiter = Limiter(
            store,
            books=gateway.lender,
            lender=gateway.lender,
            grace_s=0,
            cells=half_of_all(name),
        )
        made.append(gateway)

    async def hold(gateway: Gateway) -> int:
        held = 0
        while isinstance(await gateway.admit(5), Admission):
            held += 5
        return held

    assert await asyncio.gather(*map(hold, made)) == [50, 50]
    assert sum(each.lender.asked for each in made) < 20
    for gateway in made:
        await gateway.limiter.close()


def test_equal_parts_are_of_the_default() -> None:
    assert half_of_all("eu").part(DEFAULT, 3, 0.0) + half_of_all("us").part(DEFAULT, 3, 0.0) == 3
