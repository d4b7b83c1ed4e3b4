"""The main path with scripted replicas, on a real spool and a real Redis: whatever ends an attempt,
it is billed once, what was reserved comes back, and nothing is billed that never ran."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from billing.events import UsageEvent
from billing.price_book import PriceBook
from billing.spool import Spool, SpoolBroken
from gateway import inference
from gateway.delivery import Delivery
from gateway.fleet.errors import ReplicaLost, ReplicaUnavailable, UpstreamRefused
from gateway.fleet.replica import (
    MeteredUsage,
    PreparedRequest,
    ReplicaEvent,
    ReplicaHealth,
    TextDelta,
)
from gateway.fleet.router import Fleet, Route
from gateway.ids import uuid7
from gateway.inference import Call, Desk, Encoder, RateLimited, drain, start
from gateway.lanes import Turn
from gateway.limits.limiter import Admission, Limiter, LimiterUnavailable, Settlement
from gateway.limits.verdicts import Units
from gateway.principal import Plan, Principal
from gateway.tasks import TaskSet
from gateway.telemetry import RequestMeter, Telemetry
from gateway.wire.request import ChatPrompt, GenerateRequest

INPUT_TOKENS = 10
PLAN = Plan(
    name="test", tokens_per_minute=60_000, requests_per_minute=600, max_concurrent_streams=8
)


def usage(output: int, *, wasted: int = 0) -> MeteredUsage:
    return MeteredUsage(
        uncached_input=INPUT_TOKENS - 4, cache_read=4, output=output, wasted_output=wasted
    )


class ScriptedReplica:
    """Says `length` words, one an event; can fail before or after some of them, or wait until it is
    aborted."""

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
    ) -> None:
        self.name, self.weight = name, 1
        self.length, self.refuses, self.fails_after = length, refuses, fails_after
        self.hangs_after, self.deaf, self.wasted = hangs_after, deaf, wasted
        self.aborted = asyncio.Event()
        self.attempts: list[str] = []
        self.acknowledged: list[str] = []
        self.rests: list[bool] = []

    async def prepare(self, request: GenerateRequest) -> PreparedRequest:
        return PreparedRequest(
            request=request,
            input_tokens=INPUT_TOKENS,
            input_estimated=False,
            max_output_tokens=100,
            max_tokens_given=True,
            payload=None,
        )

    async def stream(
        self, prepared: PreparedRequest, *, attempt_id: str, cache_salt: str, turn: Turn
    ) -> AsyncGenerator[ReplicaEvent, None]:
        self.attempts.append(attempt_id)
        if self.refuses is not None:
            raise self.refuses
        for said in range(1, self.length + 1):
            if self.fails_after is not None and said > self.fails_after[0]:
                raise self.fails_after[1]
            if self.hangs_after is not None and said > self.hangs_after:
                await asyncio.Event().wait() if self.deaf else await self.aborted.wait()
                yield ReplicaEvent(usage=usage(said - 1), finished=True)
                return
            last = said == self.length
            yield ReplicaEvent(
                items=(
                    TextDelta(index=0, text=f"w{said} ", finish_reason="stop" if last else None),
                ),
                usage=usage(said, wasted=self.wasted if last else 0),
                finished=last,
            )
            await asyncio.sleep(0)

    async def rest(self, attempt_id: str, *, resting: bool) -> None:
        self.rests.append(resting)

    async def acknowledge(self, attempt_id: str) -> None:
        self.acknowledged.append(attempt_id)

    async def abort(self, attempt_id: str) -> None:
        assert attempt_id in self.attempts
        self.aborted.set()

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=True)

    async def start(self) -> None: ...

    async def close(self) -> None: ...


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

    def finish(self, usage: MeteredUsage) -> bytes:
        return b"[%d]" % usage.output


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = await Spool.open(tmp_path / "spool")
    yield spool
    await spool.shutdown()


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSet]:
    tasks = TaskSet()
    yield tasks
    await tasks.close()


class SilentEncoder(PlainEncoder):
    """Shows nothing before the end, as for an answer in one piece."""

    def encode(self, items: Sequence[object]) -> bytes:
        return b""


class Office:
    """A desk over some replicas, and what came of the requests."""

    def __init__(self, desk: Desk, redis: Redis) -> None:
        self.desk, self.redis = desk, redis
        self.org = f"org_{uuid7().hex}"
        self.telemetry = Telemetry(models=["m"])

    def begin(
        self, plan: Plan = PLAN, *, stream: bool = True, encoder: Encoder | None = None
    ) -> Delivery:
        request = GenerateRequest(
            model="m", stream=stream, include_usage=True, prompt=ChatPrompt(messages=[])
        )
        principal = Principal(
            org_id=self.org,
            project_id="proj_1",
            key_id="key_1",
            key_hint="sk-tg-...",
            scopes=frozenset({"inference"}),
            key_plan=plan,
        )
        call = Call(
            turn=Turn(),
            request_id=f"req_{uuid7().hex}",
            principal=principal,
            request=request,
            encoder=encoder or PlainEncoder(),
            meter=RequestMeter(self.telemetry, "m"),
        )
        return start(self.desk, call)

    async def settled(self) -> None:
        """Every generation has ended and holds no lease."""
        deadline = time.monotonic() + 5
        while self.desk.open_calls:
            assert time.monotonic() < deadline, "still open"
            await asyncio.sleep(0.005)
        assert await self.redis.zcard(f"tollgate:{{{self.org}}}:leases") == 0

    async def billed(self) -> list[UsageEvent]:
        return list((await self.desk.spool.read_closed(100)).events)


@pytest.fixture
async def open_office(spool: Spool, redis: Redis, tasks: TaskSet) -> AsyncIterator[type[Office]]:
    limiter = WatchedLimiter(redis)

    def make(*replicas: ScriptedReplica) -> Office:
        route = Route(model="m", kind="upstream", replicas=replicas)
        fleet = Fleet([route], rng=AsListed())
        desk = Desk(
            fleet=fleet,
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: f"salt of {org}",
            stalled_reader_s=60.0,
        )
        return Office(desk, redis)

    yield make  # type: ignore[misc]
    await limiter.close()


async def read(delivery: Delivery) -> bytes:
    whole = b""
    while (chunk := await asyncio.wait_for(delivery.next(), 5)) is not None:
        whole += chunk
    return whole


async def test_a_whole_answer_is_delivered_billed_and_settled(open_office) -> None:
    replica = ScriptedReplica(wasted=2)
    office = open_office(replica)
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    event, waste = await office.billed()
    assert replica.acknowledged == replica.attempts == [event.id]
    assert (event.quantities.uncached_input, event.quantities.cache_read) == (6, 4)
    assert (event.quantities.output, event.finish, event.kind) == (3, "done", "usage")
    assert (waste.quantities.output, waste.quantities.input_total, waste.kind) == (2, 0, "waste")
    assert waste.id != event.id


async def test_the_first_token_of_a_whole_answer_is_timed_when_it_comes(open_office) -> None:
    office = open_office(ScriptedReplica(length=9, hangs_after=1))
    delivery = office.begin(stream=False, encoder=SilentEncoder())
    value, labels = office.telemetry.registry.get_sample_value, {"model": "m"}
    async with asyncio.timeout(5):
        while value("tollgate_time_to_first_token_seconds_count", labels) != 1:
            await asyncio.sleep(0.005)
    assert office.desk.open_calls, "the rest is still to come"
    delivery.abandon()
    await office.settled()


async def test_the_end_is_delivered_only_once_it_is_on_disk(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = open_office(ScriptedReplica())
    gate = asyncio.Event()
    close = office.desk.spool.close

    async def slow_close(*events: UsageEvent) -> None:
        await gate.wait()
        await close(*events)

    monkeypatch.setattr(office.desk.spool, "close", slow_close)
    delivery = office.begin()
    await asyncio.sleep(0.05)
    assert await delivery.next() == b"w1 w2 "
    gate.set()
    assert await read(delivery) == b"w3 [3]"
    await office.settled()


async def test_the_next_replica_is_tried_before_the_first_byte(open_office) -> None:
    broken = ScriptedReplica("broken", refuses=ReplicaUnavailable("down"))
    office = open_office(broken, ScriptedReplica("sound"))
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    (event,) = await office.billed()
    assert event.id not in broken.attempts, "each attempt has its own id"


async def test_after_the_first_byte_there_is_no_other_replica(open_office) -> None:
    spare = ScriptedReplica("spare")
    lost = ScriptedReplica("lost", fails_after=(2, ReplicaLost("gone")))
    office = open_office(lost, spare)
    with pytest.raises(ReplicaLost):
        await read(office.begin())
    await office.settled()
    (event,) = await office.billed()
    assert (event.quantities.output, event.finish) == (2, "error")
    assert spare.attempts == []
    assert office.desk.limiter.settled == [INPUT_TOKENS + 2], "billed tokens are not given back"


@pytest.mark.parametrize(
    "error",
    [
        ReplicaUnavailable("down"),
        UpstreamRefused("no", status=400, error_type="invalid_request_error", error_code=None),
        RuntimeError("a bug"),
    ],
)
async def test_what_never_ran_is_not_billed(open_office, error: Exception) -> None:
    office = open_office(ScriptedReplica(refuses=error))
    with pytest.raises(type(error)):
        await read(office.begin())
    await office.settled()
    assert await office.billed() == []
    assert office.desk.limiter.settled == [None]


async def test_a_bug_in_mid_stream_is_still_billed(open_office) -> None:
    office = open_office(ScriptedReplica(fails_after=(1, RuntimeError("a bug"))))
    with pytest.raises(RuntimeError):
        await read(office.begin())
    await office.settled()
    (event,) = await office.billed()
    assert event.quantities.output == 1


async def test_a_client_that_leaves_aborts_and_pays_for_what_was_generated(open_office) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    office = open_office(replica)
    delivery = office.begin()
    assert await delivery.next() is not None
    delivery.abandon()
    await office.settled()
    assert replica.aborted.is_set()
    (event,) = await office.billed()
    assert (event.quantities.output, event.finish) == (2, "disconnect")


async def test_a_replica_that_does_not_hear_the_abort_is_left_after_a_bounded_time(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "ABORT_TIMEOUT_S", 0.05)
    replica = ScriptedReplica(length=9, hangs_after=2, deaf=True)
    office = open_office(replica)
    delivery = office.begin()
    assert await delivery.next() is not None
    delivery.abandon()
    await office.settled()
    (event,) = await office.billed()
    assert event.quantities.output == 2
    assert replica.acknowledged == [], "what it used in the end is not known"


async def test_a_refused_request_consumes_nothing(open_office) -> None:
    office = open_office(ScriptedReplica())
    tiny = Plan(name="tiny", tokens_per_minute=5)
    with pytest.raises(RateLimited) as caught:
        await read(office.begin(tiny))
    assert caught.value.refusal.retry_after_s is None
    await office.settled()
    assert await office.billed() == []
    assert office.desk.fleet.routes[0].replicas[0].attempts == []


async def test_draining_ends_what_does_not_end_by_itself(open_office) -> None:
    office = open_office(ScriptedReplica(length=9, hangs_after=2))
    delivery = office.begin()
    assert await delivery.next() is not None
    await drain(office.desk, 0.05)
    await office.settled()
    with pytest.raises(ReplicaLost):
        await read(delivery)
    (event,) = await office.billed()
    assert event.quantities.output == 2


async def test_a_whole_answer_that_could_not_be_finished_is_the_houses_loss(open_office) -> None:
    office = open_office(ScriptedReplica(fails_after=(2, ReplicaLost("gone"))))
    with pytest.raises(ReplicaLost):
        await read(office.begin(stream=False))
    await office.settled()
    (event,) = await office.billed()
    assert (event.kind, event.quantities.output, event.finish) == ("waste", 2, "error")
    assert office.desk.limiter.settled == [None]


async def test_whoever_leaves_a_whole_answer_pays_for_what_was_generated(open_office) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    office = open_office(replica)
    delivery = office.begin(stream=False)
    while not replica.attempts:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    delivery.abandon()
    await office.settled()
    (event,) = await office.billed()
    assert (event.kind, event.quantities.output, event.finish) == ("usage", 2, "disconnect")


async def test_whoever_leaves_before_it_began_asks_no_replica_and_pays_nothing(
    open_office,
) -> None:
    replica = ScriptedReplica()
    office = open_office(replica)
    office.begin().abandon()
    await office.settled()
    assert replica.attempts == [] and await office.billed() == []


async def test_a_limiter_that_is_away_is_told_later(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = open_office(ScriptedReplica())
    limiter = office.desk.limiter
    delivery = office.begin()
    probe = limiter._scripts.probe

    async def away(*_: object) -> None:
        raise LimiterUnavailable("away")

    assert await delivery.next() is not None
    monkeypatch.setattr(limiter._scripts, "probe", away)
    while await delivery.next() is not None:
        continue
    await asyncio.sleep(0.1)
    assert limiter.settled == [INPUT_TOKENS + 3] and limiter._outage._deferred
    monkeypatch.setattr(limiter._scripts, "probe", probe)
    async with asyncio.timeout(5):
        while limiter._outage._deferred:
            await asyncio.sleep(0.01)
    await office.settled()


async def test_a_flood_of_random_leavers_leaves_nothing_open(open_office) -> None:
    office = open_office(ScriptedReplica(length=20))
    wide = Plan(name="wide", tokens_per_minute=10_000_000, max_concurrent_streams=200)
    deliveries = [office.begin(wide) for _ in range(64)]
    for position, delivery in enumerate(deliveries):
        if position % 3 == 0:
            delivery.abandon()
        elif position % 3 == 1:
            await delivery.next()
            delivery.abandon()
        else:
            assert (await read(delivery)).endswith(b"[20]")
    await office.settled()
    events = await office.billed()
    assert len({event.id for event in events}) == len(events)
    assert sum(event.finish == "done" for event in events) >= 21


async def test_a_spool_that_fails_is_an_error_and_the_tokens_still_count(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = open_office(ScriptedReplica())

    async def broken(*events: UsageEvent) -> None:
        raise SpoolBroken("the disk is gone")

    monkeypatch.setattr(office.desk.spool, "close", broken)
    with pytest.raises(SpoolBroken):
        await read(office.begin())
    await office.settled()
    assert office.desk.limiter.settled == [INPUT_TOKENS + 3]
