"""No wake-up is lost, in whatever order work is made, notifications are dropped and connections
die: a machine on a real Postgres."""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.db import create_engine
from gateway.worker import work_listener
from gateway.worker.work_listener import CHANNEL, WorkListener
from tests.machines import run_machine

PATIENCE_S = 30.0
NEXT_DUE = "SELECT min(due_at) FROM work"
SOON_S = 0.05


class Worker:
    """Takes what is due, and rests where there is nothing: as each consumer of the product does."""

    def __init__(self, db: AsyncEngine, listener: WorkListener) -> None:
        self._db, self._found = db, False
        self.taken: list[int] = []
        self.looking = Periodic(
            "take work",
            lambda: 0.0 if self._found else listener.rest_s(SOON_S),
            self._take,
            log=work_listener.log,
            failure="no work is taken",
            expected=work_listener.DATABASE_ERRORS,
        )
        listener.watch("work", self.looking.wake, NEXT_DUE)

    async def _take(self) -> None:
        async with self._db.begin() as conn:
            rows = await conn.execute(
                sa.text("DELETE FROM work WHERE due_at <= now() RETURNING number")
            )
            found = [row.number for row in rows]
        self.taken += found
        self._found = bool(found)


class World:
    """A worker and its listener on a loop of their own, and who makes work beside them."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self.made = 0
        self._drops = False
        self._runner.run(self._open(url))

    async def _open(self, url: str) -> None:
        self.db, self._pool = create_engine(url), create_engine(url, pool_size=1)
        async with self.db.begin() as conn:
            await conn.execute(sa.text("DROP TABLE IF EXISTS work"))
            await conn.execute(sa.text("CREATE TABLE work (number int, due_at timestamptz)"))
        self.listener = WorkListener(self._pool, look_s=0.3, apart_s=0.01)
        heard = self.listener._heard

        def hear(connection: Any, pid: int, channel: str, topic: Any) -> None:
            if not (self._drops and topic == "work"):
                heard(connection, pid, channel, topic)

        self.listener._heard = hear  # type: ignore[method-assign]
        self.worker = Worker(self.db, self.listener)
        self.worker.looking.start()
        self.listener.start()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def make(self, *, due_in_s: float, dropped: bool, rolled_back: bool) -> None:
        self._drops = dropped
        async with self.db.connect() as conn:
            await conn.execute(
                sa.text("INSERT INTO work VALUES (:number, now() + make_interval(secs => :s))"),
                {"number": self.made, "s": due_in_s},
            )
            await conn.execute(sa.text(f"SELECT pg_notify('{CHANNEL}', 'work')"))
            if rolled_back:
                await conn.rollback()
            else:
                await conn.commit()
                self.made += 1
        await asyncio.sleep(0)

    async def kill(self) -> None:
        async with self.db.connect() as conn:
            await conn.execute(
                sa.text("""
                    SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid()
                """)
            )

    async def all_taken(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.worker.taken) < self.made:
                await asyncio.sleep(0.005)
        assert sorted(self.worker.taken) == list(range(self.made))

    async def _close(self) -> None:
        await self.listener.close()
        await self.worker.looking.close()
        await self.db.dispose()
        await self._pool.dispose()

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()


def test_no_wake_up_is_lost(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_listener, "FIRST_BACKOFF_S", 0.01)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(postgres_url)

        @rule(
            due_in_s=st.sampled_from([-1.0, 0.0, 0.02, 0.1]),
            dropped=st.booleans(),
            rolled_back=st.booleans(),
        )
        def make(self, due_in_s: float, dropped: bool, rolled_back: bool) -> None:
            made = self.world.make(due_in_s=due_in_s, dropped=dropped, rolled_back=rolled_back)
            self.world.run(made)

        @rule()
        def kill_all_connections(self) -> None:
            self.world.run(self.world.kill())

        @rule(seconds=st.sampled_from([0.0, 0.005, 0.05]))
        def go_on(self, seconds: float) -> None:
            self.world.run(asyncio.sleep(seconds))

        @rule()
        def settle(self) -> None:
            self.world.run(self.world.all_taken())

        @invariant()
        def nothing_is_taken_twice(self) -> None:
            taken = self.world.worker.taken
            assert len(taken) == len({*taken})

        def teardown(self) -> None:
            try:
                self.world.run(self.world.all_taken())
            finally:
                self.world.close()

    run_machine(Machine, examples=40, steps=12)
