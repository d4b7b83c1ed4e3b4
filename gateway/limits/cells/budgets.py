"""Knows which part of each limit this gateway may let pass, for its cell: read from Postgres every
second, together with what all cells were asked for, and told what this one was.

`shares` has the bound and why it holds. Without a cell nothing here is made, and Postgres is not
asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from foundation.periodic import Periodic
from gateway.limits.cells.demand import Demand, DemandRates
from gateway.limits.cells.shares import (
    DEADBAND,
    DEFAULT,
    DELAY_S,
    FRESH_S,
    INTERVAL_S,
    ROUND_S,
    SILENT_S,
    WHOLE,
    ShareDecision,
    ShareInForce,
    decide,
    divided,
    equal_shares,
)
from gateway.limits.cells.store import MAX_CELLS, MAX_ROWS, STORE_ERRORS, CellsSnapshot
from gateway.limits.redis.keys import scope_keys
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits
from gateway.principal import MINUTE_US

log = logging.getLogger(__name__)

TIMEOUT_S = 1.5
IDLE_S = 300.0
"""A scope of which no cell was asked for so long has the shares of all again."""
MAX_CLOSED = 64
"""Idle scopes that a gateway looks at in a round."""
MAX_DECIDED = 128
MAX_PARTS = 16_384
UNHEARD_CELLS = 2
"""So many cells there are at least, for a gateway that could not read yet."""
FORGET_EVERY = 600

CellEvent = Literal["read", "not_read", "moved", "lost"]
"""A round that read the shares or could not; a decision that moves them, or one that another
gateway was before."""
OnEvent = Callable[[CellEvent], None]
Running = Callable[[], Iterable[tuple[str, Sequence[ScopeLimits]]]]
"""Returns the org and the scopes of each request that runs here."""


class SharedStore(Protocol):
    """Keeps what cells share, as `store.CellStore` does. All methods raise STORE_ERRORS."""

    async def exchange(
        self, cell: str, told: Mapping[str, float], announced: int = 0
    ) -> CellsSnapshot: ...
    async def begin(self, first: ShareDecision) -> None: ...
    async def open(self, scopes: Sequence[str], version: int) -> None: ...
    async def replace(self, scope: str, decision: ShareDecision) -> bool: ...
    async def close(self, scope: str, of_scope: int, version: int) -> None: ...
    async def forget(self) -> None: ...


class Announcements(Protocol):
    """Hears what is announced in this cell's Redis, such as that a key was revoked."""

    num_heard: int

    def suppose_everything(self) -> None:
        """Suppose that everything has changed."""
        ...


class CellBudgets:
    """The parts of all limits that one gateway of a cell may let pass. One per process. `running`:
    what runs here. `announcements`: what is announced in this cell's Redis, of which the others
    hear within two rounds, and the other way round. `clock`: monotonic seconds."""

    def __init__(
        self,
        cell: str,
        store: SharedStore,
        *,
        running: Running = tuple,
        announcements: Announcements | None = None,
        on_event: OnEvent = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cell, self.running = cell, running
        self._store, self._on_event, self._clock = store, on_event, clock
        self._announcements, self._num_announced = announcements, 0
        self._heard_of: dict[str, int] = {}
        """By cell the announcements of which it had heard."""
        self._vectors: dict[str, ShareInForce] = {}
        self._read_at = -math.inf
        self._told_at = clock()
        self._num_rounds = 0
        self._is_cut_off = False
        self._demand, self._rates = Demand(), DemandRates()
        self._parts: dict[str, tuple[ScopeLimits, ScopeLimits]] = {}
        """By key what plans say and this cell's part of it, since the last round."""
        self._parts_until = -math.inf
        self._periodic = Periodic(
            "exchange shares of cells",
            INTERVAL_S,
            self._round,
            log=log,
            failure="the shares of cells are not known",
            at_once=False,
        )

    async def start(self) -> None:
        """Read the shares, if Postgres is there, and go on reading them."""
        await self._round()
        self._periodic.start()

    async def close(self) -> None:
        await self._periodic.close()

    # ---- requests

    def parts_of(self, org_id: str, scopes: Sequence[ScopeLimits]) -> tuple[ScopeLimits, ...]:
        """Return this cell's parts of limits, which are those of plans."""
        now = self._clock()
        if now >= self._parts_until:
            self._parts, self._parts_until = {}, self._changes_at(now)
        found: list[ScopeLimits] = []
        for key, scope in zip(scope_keys(org_id, scopes), scopes, strict=True):
            known = self._parts.get(key)
            if known is None or known[0] != scope:
                if len(self._parts) >= MAX_PARTS:
                    self._parts.clear()
                known = self._parts[key] = scope, self._part_of(key, scope, now)
            found.append(known[1])
        return tuple(found)

    def _changes_at(self, now: float) -> float:
        """Return when a part may change without a round: one is in force a little later than it
        might be, never earlier, so the next tenth of a second is soon enough for what grows; what
        shrinks does so when what was read is no longer fresh."""
        stale = [self._read_at + FRESH_S, self._read_at + FRESH_S + DELAY_S]
        return min([now + 0.1, *(at for at in stale if at > now)])

    def _part_of(self, key: str, scope: ScopeLimits, now: float) -> ScopeLimits:
        streams = scope.max_streams
        buckets: list[BucketLimit] = []
        for each in scope.buckets:
            of_minute = each.window_us == MINUTE_US
            # A bucket of a day holds all of it: what moved would be there twice that day.
            of = key if of_minute else DEFAULT
            limit, most = self.part(of, each.limit, now), self.part(of, each.burst, now)
            buckets.append(BucketLimit(each.letter, limit, most, each.window_us))
        return ScopeLimits(
            scope=scope.scope,
            owner_id=scope.owner_id,
            buckets=tuple(buckets),
            max_streams=None if streams is None else self.part(key, streams, now),
            plan=scope,
        )

    @property
    def share(self) -> int:
        """This cell's part of what is left under caps and of balances, in millionths."""
        return self.part(DEFAULT, WHOLE, self._clock())

    def part(self, key: str, amount: int, now: float) -> int:
        """Return this cell's part of an amount per minute, or of streams."""
        if not amount:
            return 0
        age_s, of_all = now - self._read_at, self._vectors.get(DEFAULT)
        equal = 0
        if age_s >= FRESH_S:
            equal = self._equal_part(amount, of_all)
            if age_s >= FRESH_S + DELAY_S:
                return max(1, equal)
        vectors = self._vectors.get(key, of_all)
        found = 0 if vectors is None else vectors.part(amount, self.cell, now)
        return max(1, found if age_s < FRESH_S else min(found, equal))

    def _equal_part(self, amount: int, of_all: ShareInForce | None) -> int:
        cells = {self.cell: 0} if of_all is None else {**of_all.decision.shares, self.cell: 0}
        if len(cells) < UNHEARD_CELLS and of_all is None:
            return amount // UNHEARD_CELLS
        return divided(amount, equal_shares(cells))[self.cell]

    def note(self, org_id: str, scopes: Sequence[ScopeLimits], units: Mapping[str, int]) -> None:
        """Note what a request wants of its scopes, whether it passes or not. `units`: by letter."""
        self._demand.note(scope_keys(org_id, scopes), [each.of_plan for each in scopes], units)

    def note_refused_stream(self, org_id: str, scope: ScopeLimits) -> None:
        (key,) = scope_keys(org_id, [scope])
        self._demand.note_running(key, scope.of_plan, is_refused=True)

    # ---- rounds

    async def _round(self) -> None:
        """Exchange once; of failures one after the other the first is logged."""
        try:
            await self.exchange()
        except STORE_ERRORS as error:
            level = logging.WARNING if not self._is_cut_off else logging.DEBUG
            log.log(level, "the shares of cells are not known (%s)", type(error).__name__)
            self._is_cut_off = True
        else:
            self._is_cut_off = False

    async def exchange(self) -> None:
        """Tell what was asked for, read what all were, and decide what is due.

        Raises: STORE_ERRORS.
        """
        for org_id, scopes in self.running():
            for key, scope in zip(scope_keys(org_id, scopes), scopes, strict=True):
                self._demand.note_running(key, scope.of_plan)
        sent_at = self._clock()
        told = self._demand.take(sent_at - self._told_at, self._vectors)
        self._told_at = sent_at
        if len(self._vectors) >= MAX_ROWS:
            told = {scope: asked for scope, asked in told.items() if scope in self._vectors}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                heard = self._announcements.num_heard if self._announcements is not None else 0
                more = heard - self._num_announced
                found = await self._store.exchange(self.cell, told, more)
                self._num_announced = heard
                self._hear_of_changes(found)
                if DEFAULT not in found.decisions:
                    await self._begin(found)
                    sent_at = self._clock()
                    found = await self._store.exchange(self.cell, {})
                self._take_over(found, sent_at)
                self._on_event("read")
                await self._decide(found, told)
        except STORE_ERRORS:
            self._on_event("not_read")
            raise
        self._num_rounds += 1
        if self._num_rounds % FORGET_EVERY == 0:
            await self._store.forget()

    def _hear_of_changes(self, found: CellsSnapshot) -> None:
        """Suppose that everything has changed where another cell has heard of a change."""
        heard_of = {
            cell: demand.announced
            for (scope, cell), demand in found.demands.items()
            if scope == DEFAULT and cell != self.cell
        }
        if self._announcements is not None and heard_of != self._heard_of:
            self._announcements.suppose_everything()
        self._heard_of = heard_of

    def _take_over(self, found: CellsSnapshot, sent_at: float) -> None:
        now, before = self._clock(), self._vectors
        vectors: dict[str, ShareInForce] = {}
        for scope, decision in found.decisions.items():
            known = before.get(scope)
            is_known = known is not None and known.decision.version == decision.version
            seen_at = known.seen_at if known is not None and is_known else now
            vectors[scope] = ShareInForce(decision, seen_at)
        self._vectors, self._read_at = vectors, sent_at
        self._parts_until = -math.inf
        sums = {key: demand.asked for key, demand in found.demands.items()}
        self._rates.note(sums, found.now_s)

    async def _decide(self, found: CellsSnapshot, told: Mapping[str, float]) -> None:
        """Move the shares of all, and of the scopes that were asked for here, where it is due."""
        alive = self._alive(found)
        of_all = found.decisions[DEFAULT]
        await self._move(DEFAULT, of_all, dict.fromkeys(alive, 0.0))
        missing = [scope for scope in told if scope not in found.decisions]
        room = MAX_ROWS - len(found.decisions)
        if missing and room > 0 and of_all.age_s >= ROUND_S:
            await self._store.open(missing[:room], of_all.version)
        for scope in list(told)[:MAX_DECIDED]:
            if (decision := found.decisions.get(scope)) is not None:
                await self._move(scope, decision, self._rates.of(scope, alive))
        await self._close_idle(found, of_all, alive)

    def _alive(self, found: CellsSnapshot) -> list[str]:
        alive = [
            cell
            for (scope, cell), demand in found.demands.items()
            if scope == DEFAULT and demand.silent_s < SILENT_S
        ]
        return sorted({*alive[:MAX_CELLS], self.cell})

    async def _begin(self, found: CellsSnapshot) -> None:
        """Make the first decision of all."""
        first = equal_shares(dict.fromkeys(self._alive(found)))
        await self._store.begin(
            ShareDecision(version=1, shares=first, before=first, moves_left=WHOLE, age_s=0.0)
        )

    async def _move(
        self, scope: str, last: ShareDecision, asked: Mapping[str, float], deadband: int = DEADBAND
    ) -> None:
        following = decide(last, asked, deadband=deadband)
        if following is None:
            return
        is_made = await self._store.replace(scope, following)
        self._on_event("moved" if is_made else "lost")

    async def _close_idle(
        self, found: CellsSnapshot, of_all: ShareDecision, alive: Sequence[str]
    ) -> None:
        """Let scopes that nobody asks for have the shares of all again, as soon as they do."""
        last_heard: dict[str, float] = {}
        for (scope, _), demand in found.demands.items():
            last_heard[scope] = min(demand.silent_s, last_heard.get(scope, math.inf))
        idle = [
            scope
            for scope in found.decisions
            if scope != DEFAULT and last_heard.get(scope, math.inf) >= IDLE_S
        ]
        for scope in idle[:MAX_CLOSED]:
            decision = found.decisions[scope]
            if decision.shares != of_all.shares:
                await self._move(scope, decision, dict.fromkeys(alive, 0.0), deadband=0)
            elif min(decision.age_s, of_all.age_s) >= ROUND_S:
                await self._store.close(scope, decision.version, of_all.version)
