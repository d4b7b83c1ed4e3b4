"""Cells exceed a hard cap by no more than stated, in whatever order requests are admitted, settled
and booked in each of them, and however long a cell cannot ask the books.

The bound is that of `gateway.limits.counter_refresh`: all that is booked, held or settled is no
more than the cap, and for each cell an equal part of what was booked since its counter was built,
and what ran there or was on its way to the books then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import redis.asyncio
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units
from gateway.limits.spending import Counter
from gateway.principal import SpendCap
from tests.gateway.limits.cells.test_cells_money import half_of_all
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, move_clock
from tests.gateway.limits.money.money_books import ORG, PRICES, BooksOfATest, who
from tests.machines import run_machine

BEGIN = 2_110_708_800.0
AMOUNT = 60_000
CAP = SpendCap("org", ORG, "total", AMOUNT)
CELLS = ("eu", "us")
NANO_A_TOKEN = 3
POSITIONS = st.integers(0, 30)


class BooksOfACell(BooksOfATest):
    """Reads the books of all cells, and notes what they had then."""

    def __init__(self, books: BooksOfATest) -> None:
        super().__init__()
        self.rows, self.of_all = books.rows, books
        self.read, self.is_away, self.was_read = 0, False, False
        self.on_read: Callable[[], None] = lambda: None

    def tick(self) -> float:
        return self.of_all.tick()

    async def spent(self, org_id: str, counters: Sequence[Counter]) -> tuple[float, list[int]]:
        if self.is_away:
            raise OSError("away")
        moment, found = await super().spent(org_id, counters)
        self.read, self.was_read = sum(found) // 1000, True
        self.on_read()
        return moment, found


@dataclass
class Ran:
    """A request that was admitted. `nano`: what it holds, or has cost."""

    cell: int
    admission: Admission
    nano: int
    is_settled: bool = False
    is_booked: bool = False


class CellsMoneyMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.now = BEGIN
        all_books = BooksOfATest()
        all_books.tick()
        self.books = [BooksOfACell(all_books) for _ in CELLS]
        self.stores = [self.run(self.connect(number)) for number in range(len(CELLS))]
        self.cells = [
            Limiter(
                store,
                books=books,
                grace_s=0,
                clock=lambda: self.now,
                monotonic=lambda: self.now,
                cells=half_of_all(name),
            )
            for name, store, books in zip(CELLS, self.stores, self.books, strict=True)
        ]
        for each in self.cells:  # it asks Redis itself, whose clock is not moved
            each.counters._now_us = self.now_us  # type: ignore[method-assign]
        self.ran: list[Ran] = []
        self.on_the_way = [0 for _ in CELLS]
        """The nano-USD that each cell held or had settled, not booked, as its counter was built."""
        for cell, books in enumerate(self.books):
            books.on_read = partial(self.note_read, cell)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def note_read(self, cell: int) -> None:
        own = (each for each in self.ran if each.cell == cell and not each.is_booked)
        self.on_the_way[cell] = sum(each.nano for each in own)

    async def now_us(self) -> int:
        return int(self.now * 1_000_000)

    async def connect(self, number: int) -> redis.asyncio.Redis:
        client = redis.asyncio.from_url(f"{self.url.partition('?')[0]}?db={number}")
        await client.flushdb()
        await client.set(CLOCK_KEY, int(self.now * 1_000_000))
        return client

    @rule(cell=st.integers(0, 1), tokens=st.sampled_from([1, 300, 2_000, 6_000]))
    def admit(self, cell: int, tokens: int) -> None:
        verdict = self.run(
            self.cells[cell].admit(
                who(CAP),
                "m",
                input_tokens=tokens,
                max_output_tokens=0,
                lease_id=f"lease-{cell}-{len(self.ran)}-{self.books[cell].tick()}",
                prices=PRICES,
                admitted_at=self.now,
            )
        )
        event(type(verdict).__name__)
        if isinstance(verdict, Refusal):
            assert verdict.kind == "money"
        else:
            self.ran.append(Ran(cell, verdict, NANO_A_TOKEN * tokens))

    @rule(cell=st.integers(0, 1))
    def flood(self, cell: int) -> None:
        for _ in range(5):
            self.admit(cell, 2_000)

    @precondition(lambda self: any(not each.is_settled for each in self.ran))
    @rule(position=POSITIONS, share=st.sampled_from([0.0, 0.5, 1.0]))
    def settle(self, position: int, share: float) -> None:
        found = [each for each in self.ran if not each.is_settled]
        one = found[position % len(found)]
        one.nano, one.is_settled = round(one.nano * share), True
        self.run(self.cells[one.cell].settle(one.admission, Units(cost_nano=one.nano)))

    def to_book(self) -> list[Ran]:
        return [each for each in self.ran if each.is_settled and not each.is_booked]

    @precondition(lambda self: self.to_book())
    @rule(position=POSITIONS, told=st.booleans())
    def book(self, position: int, told: bool) -> None:
        """`told`: its cell hears that it is booked."""
        found = self.to_book()
        one = found[position % len(found)]
        one.is_booked = True
        books, cell = self.books[one.cell], self.cells[one.cell]
        booked = books.ingest(one.admission.lease_id, "key_a", one.nano, self.now)
        if told:
            self.run(cell.counters.book([booked]))

    @rule()
    def book_all(self) -> None:
        while self.to_book():
            self.book(0, True)

    @rule(cell=st.integers(0, 1))
    def cut(self, cell: int) -> None:
        """Let the books be away, or be back. A cell that never asked them admits nobody."""
        books = self.books[cell]
        books.is_away = books.was_read and not books.is_away

    @rule(by_s=st.sampled_from([0.5, 3.0, 11.0]))
    def time_passes(self, by_s: float) -> None:
        self.now += by_s
        for store, limiter in zip(self.stores, self.cells, strict=True):
            self.run(store.set(CLOCK_KEY, int(self.now * 1_000_000)))
            self.run(limiter.renew())

    @invariant()
    def no_more_than_stated(self) -> None:
        booked = sum(each.nano for each in self.ran if each.is_booked)
        used = sum(each.nano for each in self.ran)
        used -= sum(self.on_the_way) + len(CELLS)  # each rounds by itself
        since = sum(booked - each.read for each in self.books)
        assert used <= AMOUNT + since // len(CELLS)
        assert used <= AMOUNT + AMOUNT * (len(CELLS) - 1) // len(CELLS)

    def teardown(self) -> None:
        try:
            self.check_the_end()
        finally:
            for limiter in self.cells:
                self.run(limiter.close())
            for store in self.stores:
                self.run(store.flushdb())
                self.run(store.aclose())
            self.runner.close()

    def check_the_end(self) -> None:
        """Check that what is left is to be had where all is booked and the books can be asked."""
        for books in self.books:
            books.is_away = False
        for one in self.ran:
            if not one.is_settled:
                one.nano, one.is_settled = 0, True
                self.run(self.cells[one.cell].settle(one.admission, Units()))
        self.book_all()
        left = AMOUNT - sum(each.nano for each in self.ran)
        if left >= 8 * NANO_A_TOKEN:
            tokens, before = left // 8 // NANO_A_TOKEN, len(self.ran)
            for _ in range(3):  # one that refuses asks the books again
                self.time_passes(11.0)
                self.admit(0, tokens)
            assert len(self.ran) > before


@pytest.mark.slow
def test_a_cap_is_exceeded_by_no_more_than_stated(
    redis_server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_clock(monkeypatch)

    class Bound(CellsMoneyMachine):
        url = redis_server_url

    run_machine(Bound, examples=40, steps=30)
