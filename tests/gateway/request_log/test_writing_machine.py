"""The sums by hour and by day are what a recount of the rows gives, whichever of several writers
wrote them, whatever was written twice because nobody heard of the commit."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import rule
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.request_log.histograms import pack, unpack
from gateway.request_log.rows import RequestRow
from gateway.request_log.tables import COUNTS, GROUPED, HISTOGRAMS, LATENCIES
from gateway.request_log.writer import RequestLog
from gateway.telemetry.latency_counts import BOUNDS_US, NUM_BUCKETS
from tests.databases import Databases
from tests.gateway.request_log.making import new_row
from tests.machines import DatabaseMachine, run_over_database

NOON = 1_795_780_800.0
GAPS = [pack([0] * n + [n + 1] + [0] * (NUM_BUCKETS - n - 1)) for n in (0, 40, NUM_BUCKETS - 1)]
"""Histograms of requests that had n + 1 gaps, all in the n-th bucket."""
STATUSES = (200, 400, 403, 429, 499, 500, 503)
ROWS = st.fixed_dictionaries(
    {
        "at": st.sampled_from([NOON, NOON + 3599, NOON + 3600, NOON + 86_400]),
        "org": st.sampled_from(["org_1", "org_2"]),
        "key": st.sampled_from(["key_1", "key_2"]),
        "lane": st.sampled_from(["interactive", "batch"]),
        "status": st.sampled_from(STATUSES),
        "is_good": st.sampled_from([None, True, False]),
        "ttft_us": st.none() | st.integers(0, 2**40),
        "tpot_us": st.none() | st.integers(0, 2**40),
        "queue_us": st.none() | st.integers(0, 10**6),
        "output_tokens": st.integers(0, 2**31 - 1),
        "cost_pico": st.integers(0, 2**63 - 1),
        "itl": st.none() | st.sampled_from(GAPS),
    }
)
SEES = {
    "num_refused": lambda row: 400 <= row.status < 499 and row.status != 429,
    "num_limited": lambda row: row.status == 429,
    "num_left": lambda row: row.status == 499,
    "num_failed": lambda row: row.status >= 500,
    "num_rated": lambda row: row.is_good is not None,
    "num_good": lambda row: row.is_good is True,
    "num_requests": lambda row: True,
}


class Writers(DatabaseMachine):
    def __init__(self, runner: asyncio.Runner, db: AsyncEngine) -> None:
        super().__init__(runner, db)
        self.run(self.empty)
        self.writers = [Deaf(db), Deaf(db)]
        self.made: dict[str, RequestRow] = {}

    async def empty(self) -> None:
        async with self.db.begin() as conn:
            for table in ("request_log", "requests_hourly", "requests_daily"):
                await conn.execute(sa.text(f"DELETE FROM {table}"))

    @rule(which=st.integers(0, 1), fields=ROWS)
    def answer(self, which: int, fields: dict[str, Any]) -> None:
        row = new_row(**fields)
        self.made[row.id] = row
        self.writers[which].put(row)

    @rule(which=st.integers(0, 1), number=st.integers(0))
    def answer_again(self, which: int, number: int) -> None:
        if self.made:
            self.writers[which].put([*self.made.values()][number % len(self.made)])

    @rule(which=st.integers(0, 1))
    def write(self, which: int) -> None:
        self.run(self.writers[which].flush)

    @rule()
    def write_at_once(self) -> None:
        async def both() -> None:
            await asyncio.gather(*(each.flush() for each in self.writers))

        self.run(both)

    @rule(which=st.integers(0, 1))
    def write_and_hear_nothing(self, which: int) -> None:
        self.writers[which].hears = False
        self.run(self.writers[which].flush)
        self.writers[which].hears = True

    @rule()
    def recount(self) -> None:
        self.run(self.compare)

    def teardown(self) -> None:
        for each in self.writers:
            self.run(each.flush)
        found = self.run(self.compare)
        assert found == self.made.keys()

    async def compare(self) -> set[str]:
        """Compare sums with rows, and return the ids of the rows."""
        async with self.db.connect() as conn:
            rows = (await conn.execute(sa.text("SELECT id FROM request_log"))).all()
            known = {row.id.hex for row in rows}
            for table, unit, seconds in (
                ("requests_hourly", "hour", 3600),
                ("requests_daily", "day", 86_400),
            ):
                wanted = self.counted([self.made[each] for each in known], seconds)
                names = ", ".join(("org", *GROUPED, *COUNTS, "cost_pico"))
                texts = ", ".join(f"{name}::text AS {name}" for name in HISTOGRAMS)
                query = f"SELECT {unit} AS since, {names}, {texts} FROM {table}"
                found = {}
                for row in (await conn.execute(sa.text(query))).mappings():
                    key = (row["org"], row["since"].timestamp(), *(row[each] for each in GROUPED))
                    sums = {name: int(row[name]) for name in (*COUNTS, "cost_pico")}
                    for name in HISTOGRAMS:
                        counts = unpack(row[name])
                        sums |= {f"{name}/{n}": count for n, count in enumerate(counts) if count}
                    found[key] = Counter({name: count for name, count in sums.items() if count})
                assert found == wanted
        return known

    def counted(
        self, rows: Sequence[RequestRow], seconds: int
    ) -> dict[tuple[Any, ...], Counter[str]]:
        sums: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        for row in rows:
            since = row.at_ms / 1000 // seconds * seconds
            key = (row.org, since, *(getattr(row, name) for name in GROUPED))
            total = sums[key]
            for name, sees in SEES.items():
                total[name] += sees(row)
            for name in (*set(COUNTS) - SEES.keys(), "cost_pico"):
                total[name] += getattr(row, name) or 0
            if row.itl is not None:
                number = (0, 40, NUM_BUCKETS - 1)[GAPS.index(row.itl)]
                total[f"itl/{number}"] += number + 1
            for name in LATENCIES:
                took = getattr(row, f"{name}_us")
                if took is not None:
                    total[f"{name}/{sum(bound <= took for bound in BOUNDS_US)}"] += 1
        return {key: +total for key, total in sums.items()}


class Deaf(RequestLog):
    """May not hear that what it wrote was committed."""

    hears = True

    def __init__(self, db: AsyncEngine) -> None:
        super().__init__(db, keep_days=30, on_dropped=lambda number: None, wall_clock=lambda: 0.0)

    async def _write(self, batch: Sequence[tuple[int, bytes]]) -> None:
        await super()._write(batch)
        if not self.hears:
            raise OSError("the connection broke")


def test_sums_are_a_recount_of_the_rows(databases: Databases) -> None:
    run_over_database(Writers, databases, examples=60, steps=20)
