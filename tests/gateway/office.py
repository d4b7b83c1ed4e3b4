"""Scripted replicas, and an office around them with a real spool and a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from redis.asyncio import Redis

from billing.events import UsageEvent
from engine.fake.engine import FakeCore
from engine.protocol import StepCosts
from gateway.fleet.engine_view import EngineView
from gateway.fleet.errors import ReplicaDied
from gateway.fleet.replica import ANYBODYS, EventTaker, PreparedRequest, ReplicaHealth
from gateway.fleet.sent_work import SentWork
from gateway.generate_request import ChatPrompt, GenerateRequest, bounded_to
from gateway.generation_events import MeteredUsage, ReplicaEvent, TextDelta
from gateway.ids import uuid7
from gateway.inference.calls import GenerationCall
from gateway.inference.delivery import Delivery
from gateway.inference.generate import start
from gateway.inference.services import GenerationServices
from gateway.lanes import Priority
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Settlement, Units
from gateway.principal import Plan, Principal
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.surfaces import Encoder
from tests.pace import skip

INPUT_TOKENS = 10
PLAN = Plan(
    name="test", tokens_per_minute=60_000, requests_per_minute=600, max_concurrent_streams=8
)


def usage(output: int, *, wasted: int = 0, disputed: int = 0) -> MeteredUsage:
    return MeteredUsage(
        uncached_input=INPUT_TOKENS - 4,
        cache_read=4,
        output=output,
        wasted_output=wasted,
        disputed_input=disputed,
    )


class ScriptedReplica:
    """Says `length` words, one an event; can fail before or after some of them, or wait until it is
    aborted. In the end it claims `disputed` tokens of input too many."""

    def __init__(
        self,
        name: str = "scripted",
        *,
        length: int = 3,
        refuses: Exception | None = None,
        fails_after: tuple[int, Exception] | None = None,
        hangs_after: int | None = None,
        deaf: bool = False,
        wasted: int = 0,
        disputed: int = 0,
    ) -> None:
        self.name, self.weight = name, 1
        self.length, self.refuses, self.fails_after = length, refuses, fails_after
        self.hangs_after, self.deaf, self.wasted = hangs_after, deaf, wasted
        self.disputed = disputed
        self.aborted, self.hangs = asyncio.Event(), asyncio.Event()
        self.attempts: list[str] = []
        self.acknowledged: list[str] = []
        self.rests: list[bool] = []
        self.predicted_s: float | None = None

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        return PreparedRequest(
            request=request,
            input_tokens=INPUT_TOKENS,
            max_output_tokens=100,
            max_tokens_given=True,
            payload=None,
        )

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        return msgspec.structs.replace(
            prepared,
            request=bounded_to(prepared.request, max_output_tokens),
            max_output_tokens=max_output_tokens,
            max_tokens_given=True,
        )

    def predicted_ttft_s(self, prepared: PreparedRequest, priority: Priority) -> float | None:
        return self.predicted_s

    async def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        self.attempts.append(attempt_id)
        if self.refuses is not None:
            raise self.refuses
        for said in range(1, self.length + 1):
            if self.fails_after is not None and said > self.fails_after[0]:
                raise self.fails_after[1]
            if self.hangs_after is not None and said > self.hangs_after:
                self.hangs.set()
                await asyncio.Event().wait() if self.deaf else await self.aborted.wait()
                yield ReplicaEvent(usage=usage(said - 1), finished=True)
                return
            last = said == self.length
            yield ReplicaEvent(
                items=(
                    TextDelta(index=0, text=f"w{said} ", finish_reason="stop" if last else None),
                ),
                usage=usage(
                    said,
                    wasted=self.wasted if last else 0,
                    disputed=self.disputed if last else 0,
                ),
                finished=last,
            )
            await asyncio.sleep(0)

    async def set_paused(self, attempt_id: str, *, paused: bool) -> None:
        self.rests.append(paused)

    async def acknowledge(self, attempt_id: str) -> None:
        self.acknowledged.append(attempt_id)

    async def abort(self, attempt_id: str) -> None:
        assert attempt_id in self.attempts
        self.aborted.set()

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=True)

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class ViewedScript(ScriptedReplica):
    """One of our own engines, as far as the router looks at it."""

    is_available, is_drained, is_prefill = True, False, False
    cell: str | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.round_trip_s = 0.0
        self.sent = SentWork()
        self.view = EngineView(self.sent)
        self.view.heard(msgspec.structs.replace(FakeCore().status(), costs=StepCosts(step_s=0.01)))

    def cached_tokens(self, prepared: PreparedRequest, replicas: Sequence[object]) -> Sequence[int]:
        return [0] * len(replicas)

    def may_split(self, prepared: PreparedRequest) -> bool:
        return False

    def round_trip(self) -> float:
        return self.round_trip_s


class MortalReplica(ScriptedReplica):
    """Dies with its first requests, `deaths` of them, before the first token; is back once `back`
    is set."""

    def __init__(self, *, deaths: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.deaths = deaths
        self.awaited, self.back = asyncio.Event(), asyncio.Event()

    async def wait_until_back(self, timeout_s: float) -> bool:
        self.awaited.set()
        await self.back.wait()
        return True

    async def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        self.refuses = ReplicaDied("killed") if len(self.attempts) < self.deaths else None
        events = super().stream(
            prepared, attempt_id=attempt_id, cache_salt=cache_salt, priority=priority
        )
        async with aclosing(events):
            async for event in events:
                yield event


class WatchedLimiter(Limiter):
    """The real one, and what it was told: tokens used, None for void."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.settled: list[int | None] = []

    async def settle(self, admission: Admission, used: Units) -> Settlement:
        self.settled.append(used.tokens)
        return await super().settle(admission, used)

    async def void(self, admission: Admission) -> Settlement:
        self.settled.append(None)
        return await super().void(admission)


class AsListed(random.Random):
    """Draws no lots: of replicas that are equally good the one listed first is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = itertools.count(1.0)

    def expovariate(self, lambd: float = 1.0) -> float:
        return next(self._draws)


class PlainEncoder:
    """Text as it is, and a full stop where the end goes."""

    def encode(self, items: Sequence[object]) -> bytes:
        return "".join(i.text for i in items if isinstance(i, TextDelta)).encode()

    def finish(self, usage: MeteredUsage, cost: object = None) -> bytes:
        return b"[%d]" % usage.output


class Office:
    """The services of generations over some replicas, and what came of the requests."""

    def __init__(self, services: GenerationServices, redis: Redis) -> None:
        self.services, self.redis = services, redis
        self.org = f"org_{uuid7().hex}"
        self.telemetry = Telemetry(models=["m"])

    def begin(
        self,
        plan: Plan = PLAN,
        *,
        stream: bool = True,
        encoder: Encoder | None = None,
        max_tokens: int | None = None,
        forward: dict[str, Any] | None = None,
        priority: Priority = ANYBODYS,
        timeout_s: float | None = None,
        request: GenerateRequest | None = None,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> Delivery:
        request = request or GenerateRequest(
            model="m",
            stream=stream,
            include_usage=True,
            prompt=None if forward else ChatPrompt(messages=[], max_tokens=max_tokens),
            forward=forward,
        )
        principal = Principal(
            org_id=self.org,
            project_id="proj_1",
            key_id="key_1",
            key_hint="sk-tg-...",
            scopes=frozenset({"inference"}),
            key_plan=plan,
        )
        call = GenerationCall(
            priority=priority,
            request_id=f"req_{uuid7().hex}",
            principal=principal,
            request=request,
            encoder=encoder or PlainEncoder(),
            meter=RequestMeter(self.telemetry, "m"),
            timeout_s=timeout_s,
            before_end=before_end,
        )
        return start(self.services, call)

    async def skip(self, seconds: float) -> None:
        """As `pace.skip`, but nothing is on its way to Redis, which would count as silent."""
        pipeline = self.services.limiter._scripts.pipeline
        deadline = time.monotonic() + 60
        while pipeline._queue or (pipeline._wire is not None and pipeline._wire._sent):
            assert time.monotonic() < deadline, "Redis does not answer"
            await asyncio.sleep(0.001)
        skip(seconds)

    async def settled(self) -> None:
        """Every generation has ended and holds no lease."""
        deadline = time.monotonic() + 60
        while self.services.open_calls:
            assert time.monotonic() < deadline, "still open"
            await asyncio.sleep(0.005)
        assert await self.redis.zcard(f"tollgate:{{{self.org}}}:leases") == 0

    async def written(self) -> None:
        """Wait until what the spool was told is in its file."""
        await asyncio.sleep(0)  # a task that was just made begins
        async with asyncio.timeout(30):
            while self.services.spool._buffer or self.services.spool._flushing:
                await asyncio.sleep(0.01)

    async def billed(self) -> list[UsageEvent]:
        return list((await self.services.spool.read_closed(100)).events)


async def read(delivery: Delivery) -> bytes:
    whole = b""
    while (chunk := await asyncio.wait_for(delivery.next(), 30)) is not None:
        whole += chunk
    return whole
