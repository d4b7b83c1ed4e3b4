"""One gateway's limiter under more requests than its limits let pass.

Of the requests some say how much they will write at most and some do not; a few, and from half-time
on most, write far more than is usual; a few leave early, or never run; some are asked for twice,
and some settled twice, with more.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import from_url

from bench.limits.journal import Admitted, Counted, Ends, Journal, Ready, Wrote
from bench.limits.tenant import MODELS, NARROW, callers
from foundation.tasks import TaskSet
from gateway.limits import limiter as limits
from gateway.limits import output_forecast as expected_output
from gateway.limits.allowance import Allowance
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units
from gateway.limits.slices import slices
from gateway.principal import Principal

GO = "bench:go"
"""Set when all processes are ready."""
TICK_S = 0.05
TOKENS_A_TICK = (8, 24)
USUAL, MUCH = (5, 60), (600, 1500)
"""Tokens that a request writes."""
EXPECTED = 32
"""The expected output of tenants with too little history: less than many write, so that they need
further steps and pause."""
CONTEXT = 4096
"""The longest output of a request without a bound."""
MAX_RETRY_S = 0.25


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one process; its only argument, as JSON."""

    url: str
    journal: str
    name: str
    scale: int
    max_streams: int
    num_slots: int
    """Requests at once."""
    seconds: float
    lease_ttl_s: float
    with_slices: bool


class Worker:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.draw = random.Random(load.name)
        self.callers = callers(load.scale, load.max_streams)
        self.journal = Journal(Path(load.journal))
        self.redis = from_url(load.url)
        self.limiter = Limiter(self.redis, with_slices=load.with_slices)
        self.other = Limiter(self.redis, with_slices=False)
        self.tasks = TaskSet()
        self.number = 0
        self.admitted_us: dict[str, int] = {}
        self.counts: dict[str, int] = dict.fromkeys(Counted.__struct_fields__, 0)
        self.note_moments()

    def note_moments(self) -> None:
        """Redis' time of each admission, which the limiter itself has no use for."""
        call = self.limiter._scripts.call

        async def noting(name: str, keys: Any, asked: Any) -> Any:
            reply = await call(name, keys, asked)
            if name == "admit":
                self.admitted_us[asked[0]] = reply[4]
            self.counts["extended"] += name == "extend"
            return reply

        self.limiter._scripts.call = noting  # type: ignore[method-assign]

    async def run(self) -> None:
        await self.limiter.start()
        self.journal.write(Ready())
        while not await self.redis.exists(GO):
            await asyncio.sleep(TICK_S)
        self.over_at = time.monotonic() + self.load.seconds
        await asyncio.gather(*(self.slot() for _ in range(self.load.num_slots)))
        await self.tasks.close()
        self.journal.write(Counted(**self.counts))
        await self.limiter.close()
        await self.redis.aclose()

    @property
    def share_of_much(self) -> float:
        """Little, until everybody expects little of them."""
        left_s = self.over_at - time.monotonic()
        return 0.04 if left_s > self.load.seconds / 2 else 0.8

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.over_at

    async def slot(self) -> None:
        while not self.is_over:
            await self.request()

    async def request(self) -> None:
        who, model = self.draw.choice(self.callers), self.draw.choice(MODELS)
        self.number += 1
        share_of_much = 0.5 if model == NARROW else self.share_of_much
        length = self.draw.randint(*(MUCH if self.draw.random() < share_of_much else USUAL))
        asked: dict[str, Any] = {
            "input_tokens": self.draw.randint(5, 80),
            "max_output_tokens": CONTEXT if self.draw.random() < 0.5 else length,
            "lease_id": f"{self.load.name}-{self.number}",
            "lane": "batch",
        }
        verdict = await self.limiter.admit(who, model, **asked)
        admitted_us = self.admitted_us.pop(asked["lease_id"], now_us())
        if isinstance(verdict, Refusal):
            self.counts["refused"] += 1
            wait_s = min(MAX_RETRY_S, verdict.retry_after_s or MAX_RETRY_S)
            await asyncio.sleep(wait_s * self.draw.uniform(0.5, 1.5))
            return
        reserved = verdict.reserved
        self.counts["of_slices"] += verdict.is_of_slices
        self.journal.write(
            Admitted(
                verdict.lease_id,
                admitted_us,
                who.key_id,
                model,
                reserved.input_tokens,
                reserved.output_tokens,
            )
        )
        if self.draw.random() < 0.1 and not verdict.is_of_slices:
            again = await self.other.admit(who, model, **asked)
            self.counts["replayed"] += isinstance(again, Admission)
        await self.serve(who, model, asked, verdict, length)

    async def serve(
        self, who: Principal, model: str, asked: dict[str, Any], admission: Admission, length: int
    ) -> None:
        voided = self.draw.random() < 0.05
        used = Units() if voided else await self.stream(admission, length)
        self.journal.write(Ends(admission.lease_id, now_us(), voided))
        if voided:
            await self.limiter.void(admission)
        else:
            await self.limiter.settle(admission, used)
        if self.draw.random() < 0.2 and not self.load.with_slices:
            await self.settle_again(who, model, asked, admission, used)

    async def stream(self, admission: Admission, length: int) -> Units:
        """As far as it gets: a tenth are left by their clients."""
        if self.draw.random() < 0.1:
            length = self.draw.randrange(length)
        allowance = Allowance(self.limiter, admission, self.tasks, sleep=asyncio.sleep)
        rests = False

        async def rest(resting: bool) -> None:
            nonlocal rests
            rests = resting
            self.counts["rested"] += resting

        input_tokens, written = admission.reserved.input_tokens, 0
        allowance.note(Units(input_tokens=input_tokens), rest)
        while written < length and not self.is_over:
            await asyncio.sleep(TICK_S)
            if not rests:
                tokens = min(self.draw.randint(*TOKENS_A_TICK), length - written)
                self.journal.write(Wrote(admission.lease_id, now_us(), tokens))
                written += tokens
                allowance.note(Units(input_tokens=input_tokens, output_tokens=written), rest)
        allowance.end()
        return Units(input_tokens=input_tokens, output_tokens=written)

    async def settle_again(
        self, who: Principal, model: str, asked: dict[str, Any], admission: Admission, used: Units
    ) -> None:
        """By who admitted it, by another gateway, and by a recovery; and the same id once more."""
        more = Units(input_tokens=used.input_tokens, output_tokens=used.output_tokens + 500)
        done = await asyncio.gather(
            self.limiter.settle(admission, more),
            self.other.settle(admission, Units()),
            self.other.void(admission),
            self.other.settle_lease(admission.org_id, admission.lease_id, more),
        )
        self.counts["settled_twice"] += len(done)
        self.counts["double_refused"] += done.count(Settlement.REPLAYED)
        try:
            await self.other.admit(who, model, **asked)
        except AssertionError:
            self.counts["replay_refused"] += 1


def now_us() -> int:
    """By the clock that Redis goes by, on the same machine."""
    return time.time_ns() // 1000


def main() -> None:
    load = msgspec.json.decode(sys.argv[1], type=Load)
    limits.LEASE_TTL_S = load.lease_ttl_s
    limits.RENEW_INTERVAL_S = load.lease_ttl_s / 3
    expected_output.UNKNOWN_OUTPUT_TOKENS = EXPECTED
    if load.with_slices:  # however slowly they come
        slices.BUSY_REQUESTS, slices.MIN_RATE = 1, 0.0
    asyncio.run(Worker(load).run())


if __name__ == "__main__":
    main()
