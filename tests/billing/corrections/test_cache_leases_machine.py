"""Leases that are granted, told of, lost and forgotten, before and after their events are booked:
who paid for tokens that were not kept has the premium back, once, and nobody else has anything."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from billing.cache_contracts import WRITES, Ttl
from billing.corrections.cache_leases import Lease, LiveEngine, end, grant, note_writes, sweep
from billing.events import Price, PriceSet, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.invoices.invoice import Invoice
from billing.reconciliation.checks import check_cache_leases
from tests.billing.invoices.billed import (
    DECEMBER,
    JANUARY,
    NOVEMBER,
    assert_books_agree,
    assert_leads_down,
    at,
    close_and_finalize,
    open_account,
)
from tests.billing.samples import an_attempt, an_event
from tests.databases import Databases
from tests.machines import DatabaseMachine, run_over_database

PRICES: PriceSet = {
    "uncached_input": Price("in", 100),
    "cache_write_5m": Price("write", 125),
    "cache_write_1h": Price("write_1h", 200),
}
PREMIUM: dict[Ttl, int] = {"5m": 25, "1h": 100}
MINUTES = {"5m": 5, "1h": 60}
PLACE = "here"
MONTHS = (DECEMBER, JANUARY, at(2027, 2, 1))
"""Usage is billed in these months; the last one has what came to be known by the end."""


class Written(msgspec.Struct):
    """One breakpoint of a request, as it should have ended."""

    ttl: Ttl
    num_tokens: int
    engine_id: str | None = None
    """The engine that granted the lease; None until the lease is recorded."""
    minutes_left: int = 0
    outcome: str | None = None


class BilledRequest(msgspec.Struct):
    event: UsageEvent
    written: list[Written]
    minutes_booked: int | None = None
    is_vouched: bool = False
    """True if a sweep vouched for the event: a breakpoint without a lease by then never gets one.
    """


class Machine(DatabaseMachine):
    number = 0

    def __init__(self, *lent: Any) -> None:
        super().__init__(*lent)
        Machine.number += 1
        self.org = f"org_{Machine.number}"
        self.engine_id, self.since = f"{self.org}-0", time.time() - 3600
        self.all: list[BilledRequest] = []
        self.invoices: list[Invoice] = []
        self.run(open_account, self.db, self.org, now=NOVEMBER)

    @rule(parts=st.lists(st.tuples(st.sampled_from(["1h", "5m"]), st.integers(1, 9)), min_size=1,
                         max_size=3), uncached=st.sampled_from([0, 5]))  # fmt: skip
    def asks(self, parts: list[tuple[Ttl, int]], uncached: int) -> None:
        written = [Written(ttl, 16 * blocks) for ttl, blocks in parts]
        sums = {
            name: sum(w.num_tokens for w in written if w.ttl == ttl) for ttl, name in WRITES.items()
        }
        attempt = an_attempt(org=self.org, prices=PRICES)
        event = an_event(attempt, Quantities(uncached_input=uncached, **sums))
        self.all.append(BilledRequest(event, written))

    def drawn(self, data: st.DataObject) -> tuple[BilledRequest, int]:
        asked = data.draw(st.sampled_from(self.all))
        return asked, data.draw(st.integers(0, len(asked.written) - 1))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def grants(self, data: st.DataObject) -> None:
        """Perhaps again."""
        asked, index = self.drawn(data)
        one, now = asked.written[index], time.time()
        lease = Lease(
            id=f"{asked.event.id}:{index}",
            org_id=self.org,
            event_id=asked.event.id,
            model="penny",
            engine=f"{PLACE}/{self.org}",
            engine_id=self.engine_id,
            ttl=one.ttl,
            num_tokens=one.num_tokens,
            end_tokens=16,
            prefix=f"{asked.event.id}:{index}".encode(),
            granted_at=now,
            asked_at=now,
        )
        assert self.run(grant, self.db, lease) == []
        if one.engine_id is None and one.outcome is None:
            one.engine_id, one.minutes_left = self.engine_id, MINUTES[one.ttl]

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def books(self, data: st.DataObject) -> None:
        """Perhaps again, as a shipper does that was killed before it noted how far it came."""
        asked, _ = self.drawn(data)
        self.run(ingest, self.db, [asked.event])
        self.run(note_writes, self.db, [asked.event])
        if asked.minutes_booked is None:
            asked.minutes_booked = 0

    @precondition(lambda self: self.all)
    @rule(data=st.data(), is_broken=st.booleans())
    def ends(self, data: st.DataObject, is_broken: bool) -> None:
        asked, index = self.drawn(data)
        one, event_id = asked.written[index], asked.event.id
        told = self.run(end, self.db, f"{event_id}:{index}", event_id, is_broken=is_broken)
        if one.engine_id is None:
            unrecorded = any(each.outcome == "unrecorded" for each in asked.written)
            assert told == ([] if unrecorded else None)
        elif one.outcome is None or (one.outcome == "kept" and is_broken):
            one.outcome = "evicted" if is_broken else "kept"

    @rule()
    def another_engine(self) -> None:
        self.engine_id, self.since = f"{self.engine_id}'", time.time()

    @rule(minutes=st.sampled_from([1, 6, 61]))
    def time_passes(self, minutes: int) -> None:
        self.run(self.move_back, minutes)
        self.since -= 60 * minutes
        for asked in self.all:
            if asked.minutes_booked is not None:
                asked.minutes_booked += minutes
            for one in asked.written:
                one.minutes_left -= minutes

    async def move_back(self, minutes: int) -> None:
        ago = f"interval '{minutes} minutes'"
        async with self.db.begin() as conn:
            for change in (
                f"cache_leases SET granted_at = granted_at - {ago},"
                f" kept_until = kept_until - {ago}",
                f"cache_writes SET booked_at = booked_at - {ago}",
            ):
                await conn.execute(
                    sa.text(f"UPDATE {change} WHERE org_id = :org"), {"org": self.org}
                )

    @rule()
    def sweeps(self) -> None:
        alive = LiveEngine(f"{PLACE}/{self.org}", self.engine_id, self.since)
        self.run(sweep, self.db, [alive])
        heard_long_enough = self.since < time.time() - 30
        for asked in self.all:
            for one in asked.written:
                if one.engine_id is None or one.outcome is not None:
                    continue
                if one.engine_id != self.engine_id:
                    one.outcome = "engine_lost"
                elif one.minutes_left < 0 and heard_long_enough:
                    one.outcome = "kept"
            if asked.minutes_booked and not asked.is_vouched:
                asked.is_vouched = True
                for one in asked.written:
                    if one.engine_id is None:
                        one.outcome = "unrecorded"
        assert self.run(self.owed) == self.expected()

    @precondition(lambda self: len(self.invoices) < len(MONTHS) - 1)
    @rule()
    def is_billed(self) -> None:
        self.bill()

    def bill(self) -> None:
        now = MONTHS[len(self.invoices)]
        self.invoices.append(self.run(close_and_finalize, self.db, now, self.org))

    def expected(self) -> int:
        total = 0
        for asked in self.all:
            if asked.minutes_booked is not None:
                total += 100 * asked.event.quantities.uncached_input
                for one in asked.written:
                    is_unkept = one.outcome not in (None, "kept")
                    total += one.num_tokens * (100 + (0 if is_unkept else PREMIUM[one.ttl]))
        return total

    async def owed(self) -> int:
        """And what rounding has taken off."""
        query = """
            SELECT debits_pico - credits_pico
                + (SELECT coalesce(sum(residual_pico), 0) FROM invoices WHERE org_id = :org)
            FROM balances WHERE account = 'receivable:' || :org
        """
        async with self.db.connect() as conn:
            return int(await conn.scalar(sa.text(query), {"org": self.org}) or 0)

    def teardown(self) -> None:
        while len(self.invoices) < len(MONTHS):
            self.bill()
        for invoice in self.invoices:
            self.run(assert_leads_down, self.db, invoice)
        self.run(assert_books_agree, self.db)
        assert self.run(check_cache_leases, self.db) == []


def test_what_was_not_kept_is_paid_back_once(databases: Databases) -> None:
    run_over_database(Machine, databases, examples=15, steps=25)
