"""Several workers with slices on one real Valkey, in a time that the test moves.

Each worker has a clock of its own, that began anywhere and goes a little wrong. Nothing happens
but what the test lets happen: ticks, partitions, lost answers and deaths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import redis.asyncio

from gateway.limits.counters import Books
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Units, scopes_of
from gateway.limits.redis.data_loss import OF_ALL
from gateway.limits.redis.keys import epoch_key, scope_keys
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.limits.slices import slices
from gateway.limits.slices.ledger import TTL_S, Slice
from gateway.principal import Plan, Principal
from tests.gateway.limits.limiter_oracle import CLOCK_KEY, Bucket, Taken, cost_us

START_US = 1_700_000_000_000_000
ORG = "org_a"
RENEW_US = 20_000_000
TOLD_US = 400_000
"""Within which a worker that ticks has told what ended."""


class Away(Exception):
    """Redis does not answer this worker, and it lets nothing pass by itself here."""


def caller(key_id: str, *, key: Plan, project: Plan, org: Plan) -> Principal:
    return Principal(
        org_id=ORG,
        project_id="proj_a",
        key_id=key_id,
        key_hint="",
        scopes=frozenset(),
        key_plan=key,
        project_plan=project,
        org_plan=org,
    )


async def it_was() -> bool:
    return True


@dataclass
class Request:
    worker: Worker
    who: Principal
    admission: Admission
    at_us: int
    used: int
    """Tokens that count: reserved, until it has ended."""
    charges: list[tuple[Taken, int, str]] = field(default_factory=list)
    """All that it has taken of the oracle's buckets, with each one's limit and kind."""
    is_open: bool = True


class Worker:
    """One worker. `cut`: Redis does not hear it; `mute`: it does not hear Redis."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.base_s, self.drift = 1000.0 * (7 * number + 1), 1.0 + 0.002 * (number - 1)
        self.cut = self.mute = self.stalled = False
        self.ticked_us = self.renewed_us = world.now_us
        self.is_trusted = True
        """Nothing was lost since its last tick, so Redis says what it holds."""
        self.limiter = Limiter(
            world.store,
            ever_used=it_was,
            books=world.books,
            grace_s=0,
            monotonic=self.monotonic,
            sleep=world.live,
        )
        self.slices = self.limiter._slices
        self.slices._tick = lambda: None  # type: ignore[method-assign]
        self.slices.start()
        self.slices._on_lost = self.lose
        self.limiter._outage.begins = lambda: None  # type: ignore[method-assign]
        self.limiter._admit_locally = self.away  # type: ignore[method-assign,assignment]
        self._probe = self.limiter._scripts.probe
        self.limiter._scripts.probe = self.probe  # type: ignore[method-assign]

    def lose(self) -> None:
        """Redis has lost its slices: the next tick renews what ran on them."""
        self.renewed_us = self.world.now_us - RENEW_US

    def monotonic(self) -> float:
        return self.base_s + (self.world.now_us - START_US) / 1_000_000 * self.drift

    @staticmethod
    def away(wanted: Admission) -> Refusal:
        raise Away

    async def probe(self, name: str, keys: Any, asked: Any) -> Any:
        if self.cut:
            raise LimiterUnavailable("cut off")
        answer = await self._probe(name, keys, asked)
        if self.mute:
            raise LimiterUnavailable("no answer")
        return answer

    async def tick(self) -> None:
        self.ticked_us = self.world.now_us
        for org in list(self.slices._orgs.values()):
            await self.slices._turn(org)
        await self.slices._tasks.wait()
        if not (self.cut or self.mute):
            self.is_trusted = True
            if self.world.now_us - self.renewed_us >= RENEW_US:
                self.renewed_us = self.world.now_us
                await self.limiter.renew()

    async def join_again(self) -> None:
        """Redis answers, and hears of what was settled meanwhile."""
        self.cut = self.mute = False
        self.limiter._scripts.is_away = False
        await self.limiter._outage._settle_deferred()
        await self.limiter.renew()

    def parts(self) -> list[tuple[str, Slice]]:
        """Its slices that it may use, with the name under which Redis knows them."""
        org = self.slices._orgs.get(ORG)
        if org is None:
            return []
        now = self.monotonic()
        found = org.ledger.slices.values()
        return [(org.worker, each) for each in found if now < each.valid_until]

    def young(self) -> set[str]:
        org = self.slices._orgs.get(ORG)
        return set(org.ledger.young) if org is not None else set()


class World:
    """Redis, its time, the workers, and all that has passed. `books`: what was spent."""

    def __init__(
        self, store: redis.asyncio.Redis, num_workers: int, books: Books | None = None
    ) -> None:
        self.books = books
        self.store, self.now_us, self.number = store, START_US, 0
        self.workers = [Worker(self, number) for number in range(num_workers)]
        self.num_made = num_workers
        self.requests: list[Request] = []
        self.given_back: list[tuple[int, Taken, int]] = []
        """When Redis knows that so little was used, what was taken, and that little."""
        self.buckets: dict[tuple[str, str], Bucket] = {}
        """By scope's key and kind, the bucket as one would have it who counts all at once."""

    async def begin(self) -> None:
        await self.store.flushdb()
        await self.store.set(OF_ALL, 0)
        await self.move(0)

    async def forget(self) -> None:
        """Redis loses all that it knew; its epoch begins now, for all who ask and who settle."""
        await self.store.flushdb()
        await self.move(0)
        for key in (OF_ALL, epoch_key(ORG)):
            await self.store.set(key, self.now_us)

    async def move(self, by_us: int) -> None:
        self.now_us += by_us
        while self.given_back and self.given_back[0][0] <= self.now_us:
            _, taken, taken.cost_us = self.given_back.pop(0)
        await self.store.set(CLOCK_KEY, self.now_us)

    async def live(self, seconds: float) -> None:
        """Time passes, and workers do what they do in it."""
        left_us = round(seconds * 1_000_000)
        while left_us > 0:
            step_us = min(left_us, 50_000)
            left_us -= step_us
            await self.move(step_us)
            for worker in list(self.workers):
                due_us = worker.ticked_us + round(slices.TICK_S * 1_000_000)
                if not worker.stalled and self.now_us >= due_us:
                    await worker.tick()

    async def be_quiet(self, for_us: int) -> None:
        """Let time pass, at the least `for_us`, in which nobody asks."""
        await self.live(1.0)
        for _ in range(for_us // RENEW_US + 1):
            await self.move(RENEW_US)
            await self.live(0.2)

    async def ask(
        self, worker: Worker, who: Principal, tokens: int, output: int = 0
    ) -> Admission | Refusal | None:
        """None: Redis does not answer it."""
        self.number += 1
        try:
            verdict = await worker.limiter.admit(
                who,
                "m",
                input_tokens=tokens,
                max_output_tokens=output,
                lease_id=f"lease-{self.number}",
            )
        except Away:
            return None
        if isinstance(verdict, Admission):
            self.count(worker, who, verdict)
        return verdict

    def count(self, worker: Worker, who: Principal, admission: Admission) -> None:
        request = Request(worker, who, admission, self.now_us, admission.reserved.tokens)
        units = admission.reserved.by_letter(requests=1)
        for key, scope in zip(scope_keys(ORG, admission.scopes), admission.scopes, strict=True):
            for limit in scope.buckets:
                bucket = self.buckets.setdefault((key, limit.letter), Bucket(limit.limit))
                taken = bucket.take(units[limit.letter], self.now_us)
                request.charges.append((taken, limit.limit, limit.letter))
        self.requests.append(request)

    async def settle(self, request: Request, tokens: int) -> None:
        used = Units(input_tokens=min(tokens, request.admission.reserved.tokens))
        await request.worker.limiter.settle(request.admission, used)
        await request.worker.slices._tasks.wait()
        self.end(request, used.by_letter(requests=1))

    def end(self, request: Request, used: dict[str, int]) -> None:
        """Note its end; what it gives back is there when the next exchange has told of it."""
        request.is_open, request.used = False, used["t"]
        for taken, limit, kind in request.charges:
            self.given_back.append((self.now_us + TOLD_US, taken, cost_us(used[kind], limit)))

    def kill(self, worker: Worker) -> None:
        """Its requests die with it: one that has a lease has used nothing as far as is known, of
        one that has none all counts as used."""
        for request in self.requests:
            if request.is_open and request.worker is worker:
                request.is_open = False
                if request.admission.lease_id not in worker.young():
                    self.end(request, Units().by_letter(requests=1))
        self.workers.remove(worker)
        self.num_made += 1
        self.workers.append(Worker(self, self.num_made))

    def open(self) -> list[Request]:
        return [each for each in self.requests if each.is_open]

    def open_of(self, worker: Worker) -> list[Request]:
        return [each for each in self.requests if each.is_open and each.worker is worker]

    async def scope(self, key: str) -> dict[str, Any]:
        packed = await self.store.get(key)
        found: dict[str, Any] = msgspec.msgpack.decode(packed) if packed else {}
        return found

    async def check_slices(self) -> None:
        """Check that what a worker may use stands in Redis as taken."""
        for worker in self.workers:
            if worker.cut or worker.mute or not worker.is_trusted:
                continue
            for name, part in worker.parts():
                held = (await self.scope(part.key)).get("h") or {}
                for kind, mine in part.held.items():
                    units = mine.left + mine.young + mine.done + mine.told
                    if not units:
                        continue
                    slice_ = held[name]
                    if kind == "s":
                        assert mine.left + mine.young <= slice_["s"]
                    else:
                        limit = part.limits[kind]
                        assert cost_us(units, limit.limit) <= dict(slice_["u"])[kind]

    def check_bound(self) -> None:
        """In any span of time no more passes than a burst and what refills in it."""
        for (key, kind), bucket in self.buckets.items():
            if not bucket.limit:
                continue
            passed = sorted(
                (request.at_us, amount)
                for request in self.requests
                if (amount := amount_of(request, key, kind)) > 0
            )
            largest = max((amount for _, amount in passed), default=0)
            base = max(bucket.burst, largest)
            for start, (first_us, _) in enumerate(passed):
                total = 0
                for at_us, amount in passed[start:]:
                    total += amount
                    refilled = (at_us - first_us) * bucket.limit / 60_000_000
                    assert total <= base + refilled + 1, (key, kind, total, base, refilled)

    def deficit_share(self, key: str, kind: str) -> float:
        bucket = self.buckets.get((key, kind))
        if bucket is None:
            return 0.0
        return bucket.deficit_us(self.now_us) / cost_us(bucket.burst, bucket.limit)


def amount_of(request: Request, key: str, kind: str) -> int:
    scopes = request.admission.scopes
    if key not in scope_keys(ORG, scopes):
        return 0
    return 1 if kind == "r" else request.used


def everything(who: Principal) -> list[str]:
    return scope_keys(ORG, scopes_of(who, "m", "interactive"))


def be_busy_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let one request make an organization busy, and no quiet make it idle but IDLE_S."""
    patch.setattr(slices, "BUSY_REQUESTS", 1)
    patch.setattr(slices, "MIN_RATE", 0.0)


MAX_BACK_S = TTL_S + 2.5
"""After which what died with a worker is there again."""
