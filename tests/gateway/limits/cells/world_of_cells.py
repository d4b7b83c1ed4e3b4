"""Cells that share a store in memory, in a time that the test moves.

Each gateway has a clock of its own, which began anywhere and goes a little wrong. Each cell has one
bucket, which its gateways fill and take from as the scripts in Redis do: it keeps its deficit as
the time that it takes to refill.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.shares import DEFAULT, FRESH_S, INTERVAL_S, ROUND_S, ShareDecision
from gateway.limits.cells.store import CellDemand, CellsSnapshot
from gateway.limits.outcomes import buckets_of
from gateway.limits.redis.keys import scope_keys
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.principal import MINUTE_US, Plan

ORG = "org_a"
LIMIT = 6_000
BURST = LIMIT // 6
STEP_S = 0.25
PLAN = ScopeLimits(
    scope="org",
    owner_id=ORG,
    buckets=buckets_of(Plan(name="p", tokens_per_minute=LIMIT), "interactive"),
    max_streams=None,
)
(KEY,) = scope_keys(ORG, [PLAN])


class StoreInMemory:
    """Does what `CellStore` does, without Postgres. One object serves all gateways."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._decided: dict[str, tuple[ShareDecision, float]] = {}
        self._asked: dict[tuple[str, str], tuple[float, float]] = {}

    @property
    def scopes(self) -> set[str]:
        return {*self._decided, *(scope for scope, _ in self._asked)}

    async def exchange(
        self, cell: str, told: Mapping[str, float], announced: int = 0
    ) -> CellsSnapshot:
        now = self._world.now_s
        for scope, asked in {DEFAULT: 0.0, **told}.items():
            before, _ = self._asked.get((scope, cell), (0.0, 0.0))
            self._asked[scope, cell] = before + asked, now
        return CellsSnapshot(
            decisions={
                scope: msgspec.structs.replace(each, age_s=now - at)
                for scope, (each, at) in self._decided.items()
            },
            demands={key: CellDemand(asked, now - at) for key, (asked, at) in self._asked.items()},
            now_s=now,
        )

    async def begin(self, first: ShareDecision) -> None:
        self._decided.setdefault(DEFAULT, (first, self._world.now_s))

    async def open(self, scopes: Sequence[str], version: int) -> None:
        of_all, at = self._decided[DEFAULT]
        now = self._world.now_s
        if of_all.version == version and now - at > ROUND_S:
            first = msgspec.structs.replace(of_all, version=1, before=of_all.shares)
            for scope in scopes:
                self._decided.setdefault(scope, (first, now))

    async def replace(self, scope: str, decision: ShareDecision) -> bool:
        known = self._decided.get(scope)
        if known is None or known[0].version != decision.version - 1:
            return False
        self._decided[scope] = decision, self._world.now_s
        return True

    async def close(self, scope: str, of_scope: int, version: int) -> None:
        known, of_all = self._decided.get(scope), self._decided[DEFAULT][0]
        if known and known[0].version == of_scope and of_all.version == version:
            if known[0].shares == of_all.shares:
                del self._decided[scope]
                for key in [key for key in self._asked if key[0] == scope]:
                    del self._asked[key]

    async def forget(self) -> None:
        return None


class Link:
    """A gateway's way to the store: cut, deaf (what it writes arrives and no answer comes), or
    slow."""

    def __init__(self, store: StoreInMemory) -> None:
        self._store = store
        self.is_cut = self.is_deaf = False
        self.answers: asyncio.Event | None = None

    async def exchange(
        self, cell: str, told: Mapping[str, float], announced: int = 0
    ) -> CellsSnapshot:
        if self.is_cut:
            raise OSError("cut off")
        found = await self._store.exchange(cell, told)
        if self.is_deaf:
            raise OSError("no answer")
        if self.answers is not None:
            await self.answers.wait()
        return found

    async def begin(self, first: ShareDecision) -> None:
        await self._store.begin(first)

    async def open(self, scopes: Sequence[str], version: int) -> None:
        await self._store.open(scopes, version)

    async def replace(self, scope: str, decision: ShareDecision) -> bool:
        is_made = await self._store.replace(scope, decision)
        if self.is_deaf:
            raise OSError("no answer")
        return is_made

    async def close(self, scope: str, of_scope: int, version: int) -> None:
        await self._store.close(scope, of_scope, version)

    async def forget(self) -> None:
        await self._store.forget()


@dataclass
class Gateway:
    world: World
    cell: str
    base_s: float
    drift: float
    next_tick_s: float
    is_paused: bool = False
    pending: asyncio.Task[None] | None = None
    answer_at_s: float = 0.0
    budgets: CellBudgets = field(init=False)
    link: Link = field(init=False)

    def __post_init__(self) -> None:
        self.link = Link(self.world.store)
        self.budgets = CellBudgets(self.cell, self.link, clock=self.clock)

    def clock(self) -> float:
        return self.base_s + self.world.now_s * self.drift

    @property
    def limit(self) -> int:
        """Its part of the limit, now."""
        (scope,) = self.budgets.parts_of(ORG, [PLAN])
        return scope.buckets[0].limit

    @property
    def is_stale(self) -> bool:
        return self.clock() - self.budgets._read_at >= FRESH_S

    def ask(self, tokens: int) -> bool:
        """Let a request pass from the cell's bucket, or not."""
        scopes = self.budgets.parts_of(ORG, [PLAN])
        self.budgets.note(ORG, scopes, {"t": tokens})
        bucket = scopes[0].buckets[0]
        full_at = self.world.full_at_s.get(self.cell, 0.0)
        second = bucket.window_us / MINUTE_US * 60 / bucket.limit
        deficit_s = max(0.0, full_at - self.world.now_s)
        if tokens > bucket.burst or deficit_s + tokens * second > bucket.burst * second + 1e-9:
            return False
        self.world.full_at_s[self.cell] = self.world.now_s + deficit_s + tokens * second
        return True


class World:
    """Cells and their gateways. `passed`: moments and tokens."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.store = StoreInMemory(self)
        self.gateways: list[Gateway] = []
        self.full_at_s: dict[str, float] = {}
        self.passed: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def close(self) -> None:
        for each in self.gateways:
            if each.pending is not None:
                each.pending.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def add(self, cell: str) -> Gateway:
        number = next(self._numbers)
        drift = 1.0 + 0.004 * (number % 3 - 1)
        made = Gateway(self, cell, 7_777.0 * number, drift, self.now_s + 0.25 * (number % 4))
        self.gateways.append(made)
        return made

    def kill(self, gateway: Gateway) -> None:
        self.gateways.remove(gateway)
        if gateway.pending is not None:
            gateway.pending.cancel()

    @property
    def cells(self) -> set[str]:
        return {each.cell for each in self.gateways}

    def of(self, cell: str) -> list[Gateway]:
        return [each for each in self.gateways if each.cell == cell]

    def limit_of(self, cell: str) -> int:
        """The largest part that a gateway of it may use now; one that is paused uses none."""
        return max((each.limit for each in self.of(cell) if not each.is_paused), default=0)

    def step(self) -> None:
        """Let STEP_S pass, and do what is due."""
        self.now_s += STEP_S
        for each in self.gateways:
            if each.pending is not None:
                if self.now_s >= each.answer_at_s and not each.is_paused:
                    assert each.link.answers is not None
                    each.link.answers.set()
                    self._run(each.pending)
                    each.pending, each.link.answers = None, None
            elif self.now_s >= each.next_tick_s and not each.is_paused:
                each.next_tick_s = self.now_s + INTERVAL_S
                task = self._loop.create_task(each.budgets._round())
                if each.link.answers is None:
                    self._run(task)
                else:
                    self._loop.run_until_complete(asyncio.sleep(0))
                    self._loop.run_until_complete(asyncio.sleep(0))
                    each.pending = task

    def _run(self, task: asyncio.Task[None]) -> None:
        self._loop.run_until_complete(task)

    def ask(self, gateway: Gateway, tokens: int) -> bool:
        if not gateway.ask(tokens):
            return False
        self.passed.append((self.now_s, tokens))
        return True
