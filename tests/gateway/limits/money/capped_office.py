"""An office under a hard cap of one key: what its requests are, what it was counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.tasks import TaskSet
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import GenerateRequest
from gateway.ids import uuid7
from gateway.inference.calls import GenerationCall
from gateway.inference.generate import start
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority
from gateway.limits.limiter import Limiter
from gateway.limits.spending import counter_of
from gateway.principal import Principal, SpendCap
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from tests.gateway.office import AsListed, PlainEncoder, read

IDLE_TIMEOUT_S = 30.0


class CappedOffice:
    """`key_a` asks; it has one hard cap, on all that it spends."""

    def __init__(self, services: GenerationServices, redis: Redis, models: Sequence[str]) -> None:
        self.services, self.redis = services, redis
        self.telemetry = Telemetry(models=models)

    async def ask(
        self, request: GenerateRequest, cap_nano: int, *, timeout_s: float | None = None
    ) -> bytes:
        """Returns when nothing is open any more, whatever came of it."""
        caller = Principal(
            org_id="org_a",
            project_id="proj_a",
            key_id="key_a",
            key_hint="",
            scopes=frozenset({"inference"}),
            spend_caps=(SpendCap("key", "key_a", "total", cap_nano),),
        )
        call = GenerationCall(
            priority=Priority(),
            request_id=f"req_{uuid7().hex}",
            principal=caller,
            request=request,
            encoder=PlainEncoder(),
            meter=RequestMeter(self.telemetry, request.model),
            timeout_s=timeout_s,
        )
        try:
            return await read(start(self.services, call))
        finally:
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            while self.services.open_calls:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

    async def counted(self) -> int:
        """Nano-USD; -1: there is no counter."""
        key = counter_of("key", "key_a", "total", 0).key("org_a")
        return int(await self.redis.hget(key, "n") or -1)


@asynccontextmanager
async def open_office(
    redis: Redis, folder: Path, routes: Sequence[Route], book: str
) -> AsyncIterator[CappedOffice]:
    """`book`: a price book's text."""
    path = folder / "book.toml"
    path.write_text(book)
    spool, tasks = await Spool.open(folder / "spool"), TaskSet()
    limiter = Limiter(redis, grace_s=0)
    services = GenerationServices(
        fleet=Fleet(routes, rng=AsListed()),
        limiter=limiter,
        spool=spool,
        price_book=PriceBook.load([path]),
        tasks=tasks,
        cache_salts=lambda org: org,
        stalled_reader_s=60.0,
    )
    yield CappedOffice(services, redis, [route.model for route in routes])
    await tasks.close()
    await limiter.close()
    await spool.shutdown()
