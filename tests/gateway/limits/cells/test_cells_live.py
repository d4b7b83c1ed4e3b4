"""Two cells with a Valkey each and one Postgres let pass one limit together; the one that is left
lets all of it pass."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.home import Home
from gateway.ids import uuid7
from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.shares import TAKEN_OVER_S, WHOLE, ShareDecision, equal_shares
from gateway.limits.cells.store import CellStore
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.principal import Plan, Principal
from gateway.processes import embedded_databases as embedded
from tests.budget import NIGHT
from tests.scratch import make_scratch

LIMIT = 60_000
BURST = LIMIT // 6
TENANT = Principal(
    org_id="org_a",
    project_id="proj_a",
    key_id="key_a",
    key_hint="",
    scopes=frozenset(),
    org_plan=Plan(name="p", tokens_per_minute=LIMIT, max_concurrent_streams=8),
)


@dataclass
class Cell:
    budgets: CellBudgets
    limiter: Limiter

    async def ask(self, tokens: int) -> Admission | Refusal:
        return await self.limiter.admit(
            TENANT, "m", input_tokens=tokens, max_output_tokens=0, lease_id=uuid7().hex
        )

    async def spend(self, tokens: int) -> int:
        """Ask for tokens, use them all at once, and return how many there were."""
        found = await self.ask(tokens)
        if isinstance(found, Refusal):
            return 0
        await self.limiter.settle(found, Units(input_tokens=tokens))
        return tokens

    async def flood(self, tokens: int, until: float) -> int:
        passed = 0
        while time.monotonic() < until:
            passed += sum(await asyncio.gather(*(self.spend(tokens) for _ in range(8))))
            await asyncio.sleep(0.01)
        return passed


@pytest.fixture
async def other_redis_url() -> AsyncIterator[str]:
    folder = make_scratch()
    home = Home(folder)
    home.create()
    child = await embedded.start_redis(home, durable=False)
    yield embedded.redis_url(home)
    await child.stop(embedded.STOP_TIMEOUT_S)
    shutil.rmtree(folder)


@pytest.fixture
async def cells(
    db: AsyncEngine, redis_url: str, other_redis_url: str
) -> AsyncIterator[tuple[Cell, Cell]]:
    """Two that began together, so that each has half of all."""
    first = equal_shares(dict.fromkeys(["eu", "us"]))
    store = CellStore(db)
    await store.begin(
        ShareDecision(version=1, shares=first, before=first, moves_left=WHOLE, age_s=0.0)
    )
    async with AsyncExitStack() as stack:
        made = []
        for name, url in (("eu", redis_url), ("us", other_redis_url)):
            client = redis.asyncio.from_url(url)
            stack.push_async_callback(client.aclose)
            budgets = CellBudgets(name, store)
            limiter = Limiter(client, cells=budgets)
            await limiter.start()
            stack.push_async_callback(limiter.close)
            made.append(Cell(budgets, limiter))
        eu, us = made
        yield eu, us


async def test_what_passes_in_both_is_one_limit(cells: tuple[Cell, Cell]) -> None:
    begun = time.monotonic()
    passed = await asyncio.gather(*(each.flood(250, begun + 1.5) for each in cells))
    elapsed = time.monotonic() - begun
    assert sum(passed) <= BURST + LIMIT / 60 * elapsed
    assert min(passed) >= BURST // 2 - 250


async def test_streams_are_divided_to_the_last_one(cells: tuple[Cell, Cell]) -> None:
    for each in cells:
        found = [await each.ask(1) for _ in range(5)]
        assert [isinstance(one, Admission) for one in found] == [True] * 4 + [False]


async def test_a_request_larger_than_a_part_passes_and_is_paid_for(
    cells: tuple[Cell, Cell],
) -> None:
    eu, _ = cells
    assert await eu.spend(LIMIT) == LIMIT
    found = await eu.ask(1)
    assert isinstance(found, Refusal) and found.retry_after_s is not None
    assert found.retry_after_s > 60, "the cell's part refills half as fast as the limit"


async def test_a_request_that_no_plan_lets_pass_is_refused_for_good(
    cells: tuple[Cell, Cell],
) -> None:
    found = await cells[0].ask(LIMIT + 1)
    assert isinstance(found, Refusal) and found.retry_after_s is None


@NIGHT
async def test_a_dead_cell_is_taken_over(cells: tuple[Cell, Cell]) -> None:
    eu, us = cells
    await us.budgets.close()
    begun = time.monotonic()
    passed = 0
    while (part := eu.budgets.part("", LIMIT, time.monotonic())) < LIMIT:
        assert time.monotonic() - begun < 2 * TAKEN_OVER_S, part
        passed += await eu.flood(250, time.monotonic() + 0.25)
    elapsed = time.monotonic() - begun
    # Half of the burst comes with the other half of the limit.
    assert passed <= BURST + LIMIT / 60 * elapsed + BURST // 2
    more = await eu.flood(250, time.monotonic() + 5)
    assert more > LIMIT / 60 * 5 * 0.8
