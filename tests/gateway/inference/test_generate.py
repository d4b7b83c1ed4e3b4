"""The main path with scripted replicas, on a real spool and a real Redis: whatever ends an attempt,
it is billed once, what was reserved comes back, and nothing is billed that never ran."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import create_async_engine

from billing.errors import SpoolBroken, SpoolFull
from billing.events import DisputedUsage, Quantities, UsageEvent
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from foundation.request_context import LOG_CONTEXT, LogContext
from foundation.tasks import TaskSet
from gateway.fleet.errors import (
    DeadlinePassed,
    NoSlot,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UpstreamRefused,
)
from gateway.fleet.replica import ANYBODYS, EventTaker, PreparedRequest
from gateway.fleet.router import Fleet, Route
from gateway.generate_request import GenerateRequest
from gateway.generation_events import ReplicaEvent
from gateway.http_errors.table import to_http_error
from gateway.inference import attempt as attempt_module
from gateway.inference.generate import RateLimited
from gateway.inference.services import GenerationServices
from gateway.inference.settlement import CrashSettlement
from gateway.lanes import Priority
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.principal import Plan
from tests.billing.spool.test_spool import full_disk
from tests.gateway.office import (
    INPUT_TOKENS,
    AsListed,
    MortalReplica,
    Office,
    PlainEncoder,
    ScriptedReplica,
    ViewedScript,
    WatchedLimiter,
    read,
)


class SilentEncoder(PlainEncoder):
    """Shows nothing before the end, as for an answer in one piece."""

    def encode(self, items: Sequence[object]) -> bytes:
        return b""


@pytest.fixture
async def open_office(spool: Spool, redis: Redis, tasks: TaskSet) -> AsyncIterator[type[Office]]:
    limiter = WatchedLimiter(redis)

    def make(*replicas: ScriptedReplica) -> Office:
        route = Route(model="m", kind="upstream", replicas=replicas)
        fleet = Fleet([route], rng=AsListed())
        services = GenerationServices(
            fleet=fleet,
            limiter=limiter,
            spool=spool,
            price_book=PriceBook.load(),
            tasks=tasks,
            cache_salts=lambda org: f"salt of {org}",
            stalled_reader_s=60.0,
        )
        return Office(services, redis)

    yield make  # type: ignore[misc]
    await limiter.close()


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


async def test_a_request_has_its_stages_over_all_attempts(open_office) -> None:
    LOG_CONTEXT.set(context := LogContext("req_" + "1" * 32))
    broken = ScriptedReplica("m/0", refuses=ReplicaUnavailable("down"))
    office = open_office(broken, ScriptedReplica("m/1"))
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    stages = context.stages
    assert [(each.name, each.about, each.outcome) for each in stages] == [
        ("prepare", "m/0", ""),
        ("admit", "", ""),
        ("attempt", "m/0", "ReplicaUnavailable"),
        ("prepare", "m/1", ""),
        ("attempt", "m/1", ""),
        ("prefill", "", ""),
        ("decode", "", ""),
        ("settle", "", ""),
    ]
    assert all(0 < each.began_at <= each.ended_at for each in stages)
    *_, attempt, prefill, decode, _settle = stages
    assert prefill.within is decode.within is attempt
    assert prefill.began_at == attempt.began_at and prefill.ended_at == decode.began_at
    assert decode.ended_at <= attempt.ended_at


async def test_a_generation_that_has_ended_is_gone_without_the_collector(open_office) -> None:
    """With its prompt, which may be large: the collector comes by after thousands of them."""
    office = open_office(ScriptedReplica())
    gc.disable()
    try:
        delivery = office.begin()
        kept = weakref.ref(delivery)
        assert await read(delivery) == b"w1 w2 w3 [3]"
        await office.settled()
        del delivery
        assert kept() is None
    finally:
        gc.enable()


async def test_the_first_token_of_a_whole_answer_is_timed_when_it_comes(open_office) -> None:
    office = open_office(ScriptedReplica(length=9, hangs_after=1))
    delivery = office.begin(stream=False, encoder=SilentEncoder())
    value, labels = office.telemetry.registry.get_sample_value, {"model": "m"}
    async with asyncio.timeout(30):
        while value("tollgate_time_to_first_token_seconds_count", labels) != 1:
            await asyncio.sleep(0.005)
    assert office.services.open_calls, "the rest is still to come"
    delivery.abandon()
    await office.settled()


async def test_the_first_token_of_a_stream_is_timed_when_it_is_written(open_office) -> None:
    office = open_office(ScriptedReplica(length=9, hangs_after=3))
    delivery = office.begin()
    value, labels = office.telemetry.registry.get_sample_value, {"model": "m"}
    count = "tollgate_time_to_first_token_seconds_count"
    async with asyncio.timeout(30):
        assert b"w1" in (await delivery.next() or b"")
        assert value(count, labels) is None, "who took it has not written it yet"
        reading = asyncio.create_task(delivery.next())
        while value(count, labels) != 1:
            await asyncio.sleep(0.005)
    delivery.abandon()
    await reading
    await office.settled()
    assert value(count, labels) == 1


async def test_the_first_token_waits_for_no_disk_and_the_end_does(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = open_office(ScriptedReplica())
    office.services.spool._background.close()  # of the kernel: it syncs in threads
    gate, sync = threading.Event(), os.fdatasync

    def slow_sync(fd: int) -> None:
        gate.wait(60.0)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    delivery, found = office.begin(), b""
    while found != b"w1 w2 ":  # OPEN is not on disk yet
        found += await asyncio.wait_for(delivery.next(), 30) or b""
    end = asyncio.create_task(read(delivery))
    await asyncio.sleep(0.05)
    assert not end.done()
    gate.set()
    assert await end == b"w3 [3]"
    await office.settled()


async def bill_of_a_crash(office: Office, folder: Path) -> UsageEvent:
    """Return what a restart would bill of the one attempt, were this process killed now."""
    await office.written()
    shutil.copytree(office.services.spool.directory, folder)
    after = await Spool.open(folder)
    await after.shutdown()
    (event,) = after.recovered
    return event


async def test_what_was_generated_and_not_sent_is_not_on_a_crashs_bill(
    open_office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "CHECKPOINT_INTERVAL_S", 60.0)
    monkeypatch.setattr(attempt_module, "CHECKPOINT_TOKENS", 4)
    office = open_office(replica := ScriptedReplica(length=90, hangs_after=9))
    delivery = office.begin()
    await replica.hangs.wait()
    bill = await bill_of_a_crash(office, tmp_path / "before")
    assert bill.quantities == Quantities(), "nine words are queued, and nobody has one"
    assert await delivery.next() == b"w1 w2 w3 w4 w5 w6 w7 w8 w9 "
    assert (await bill_of_a_crash(office, tmp_path / "sending")).quantities == Quantities()
    reading = asyncio.create_task(delivery.next())
    sent = (await bill_of_a_crash(office, tmp_path / "sent")).quantities
    assert (sent.output, sent.input_total) == (9, INPUT_TOKENS), "1, 5 and 9 were marked"
    delivery.abandon()
    await reading
    await office.settled()


async def test_a_whole_answer_is_on_no_bill_before_it_is_whole(open_office, tmp_path: Path) -> None:
    office = open_office(replica := ScriptedReplica(length=9, hangs_after=5))
    delivery = office.begin(stream=False, encoder=SilentEncoder())
    await replica.hangs.wait()
    bill = await bill_of_a_crash(office, tmp_path / "copy")
    assert (bill.quantities, bill.finish) == (Quantities(), "recovered")
    delivery.abandon()
    await office.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_disputed_before_a_crash_is_on_record(
    open_office, tmp_path: Path, stream: bool
) -> None:
    """Killed while its answer is being kept: what the upstream claimed at the end, and no more than
    was sent."""
    office = open_office(ScriptedReplica(length=3, disputed=7))
    keeping, may_go_on = asyncio.Event(), asyncio.Event()

    async def keep() -> None:
        keeping.set()
        await may_go_on.wait()

    encoder = PlainEncoder() if stream else SilentEncoder()
    reading = asyncio.create_task(
        read(office.begin(stream=stream, encoder=encoder, before_end=keep))
    )
    await asyncio.wait_for(keeping.wait(), 30)
    killed = await bill_of_a_crash(office, tmp_path / "killed")
    may_go_on.set()
    await reading
    await office.settled()
    (event,) = await office.billed()
    assert killed.disputed == event.disputed == DisputedUsage("scripted", 7, 0)
    assert killed.finish == "recovered" and event.quantities.output == 3
    assert killed.quantities.output < 3 if stream else killed.quantities == Quantities()
    count, labels = "tollgate_upstream_disputes_total", {"upstream": "scripted"}
    assert office.telemetry.registry.get_sample_value(count, labels) == 1
    settlement = CrashSettlement(
        db=create_async_engine("postgresql+asyncpg://"),  # nobody asks it here
        limiter=office.services.limiter,
        tasks=office.services.tasks,
        price_book=office.services.price_book,
        telemetry=office.telemetry,
    )
    settlement.recovered([killed])
    assert office.telemetry.registry.get_sample_value(count, labels) == 2


@pytest.mark.parametrize(
    ("stream", "kind", "finish"), [(False, "waste", "error"), (True, "usage", "done")]
)
async def test_what_a_full_disk_withholds_is_the_houses(
    open_office, stream: bool, kind: str, finish: str
) -> None:
    """The bill finds no room, so that the answer's end does not go out; it does later. Who had
    begun to read is billed what it read."""
    office = open_office(ScriptedReplica(length=3))
    (segment,) = office.services.spool.directory.glob("*.log")
    with full_disk(segment.stat().st_size):
        delivery = office.begin(
            stream=stream, encoder=PlainEncoder() if stream else SilentEncoder()
        )
        with pytest.raises(SpoolFull):
            await read(delivery)
        await office.settled()
    async with asyncio.timeout(30):
        while not (billed := await office.billed()):
            await asyncio.sleep(0.01)
    (event,) = billed
    assert (event.kind, event.finish, event.quantities.output) == (kind, finish, 3)


async def test_an_answer_that_cannot_be_kept_is_on_nobodys_bill(open_office) -> None:
    office = open_office(ScriptedReplica(length=3))

    async def fails() -> None:
        raise ConnectionError("no database")

    delivery = office.begin(stream=False, encoder=SilentEncoder(), before_end=fails)
    with pytest.raises(ConnectionError):
        await read(delivery)
    await office.settled()
    (event,) = await office.billed()
    assert (event.kind, event.finish, event.quantities.output) == ("waste", "error", 3)


async def test_a_stream_that_we_lose_before_its_first_byte_is_the_houses(open_office) -> None:
    office = open_office(ScriptedReplica(fails_after=(1, ReplicaLost("gone"))))
    with pytest.raises(ReplicaLost):
        await read(office.begin(encoder=SilentEncoder()))
    await office.settled()
    (event,) = await office.billed()
    assert (event.kind, event.finish, event.quantities.output) == ("waste", "error", 1)


async def test_the_next_replica_is_tried_before_the_first_byte(open_office) -> None:
    broken = ScriptedReplica("broken", refuses=ReplicaUnavailable("down"))
    office = open_office(broken, ScriptedReplica("sound"))
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    (event,) = await office.billed()
    assert event.id not in broken.attempts, "each attempt has its own id"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_before_the_first_token_is_tried_once_more(
    open_office, stream: bool
) -> None:
    mortal = MortalReplica()
    office = open_office(mortal)
    delivery = office.begin(stream=stream, encoder=None if stream else SilentEncoder())
    await asyncio.wait_for(mortal.awaited.wait(), 30)
    assert len(mortal.attempts) == 1, "it is not asked before it is back"
    mortal.back.set()
    assert (await read(delivery)).endswith(b"[3]")
    await office.settled()
    (event,) = await office.billed()
    assert [event.id] == mortal.attempts[1:] == mortal.acknowledged
    assert (event.kind, event.finish, event.quantities.output) == ("usage", "done", 3)
    assert office.services.limiter.settled == [INPUT_TOKENS + 3], "reserved and settled once"
    assert office.services.spool._open == {}


async def test_who_dies_twice_is_not_tried_again(open_office) -> None:
    mortal = MortalReplica(deaths=9)
    mortal.back.set()
    office = open_office(mortal)
    with pytest.raises(ReplicaUnavailable):
        await read(office.begin())
    await office.settled()
    assert len(mortal.attempts) == 2
    assert await office.billed() == [] and office.services.limiter.settled == [None]


async def test_another_replica_is_asked_sooner_than_one_that_has_died(open_office) -> None:
    mortal, spare = MortalReplica(name="mortal"), ScriptedReplica("spare")
    office = open_office(mortal, spare)
    assert await read(office.begin()) == b"w1 w2 w3 [3]"
    await office.settled()
    assert len(mortal.attempts) == len(spare.attempts) == 1
    assert not mortal.awaited.is_set()


async def test_where_the_other_one_is_away_too_the_first_to_be_back_is_asked(open_office) -> None:
    mortal = MortalReplica(name="mortal")
    office = open_office(mortal, ScriptedReplica("away", refuses=ReplicaUnavailable("dead")))
    delivery = office.begin()
    await asyncio.wait_for(mortal.awaited.wait(), 30)
    mortal.back.set()
    assert await read(delivery) == b"w1 w2 w3 [3]"
    await office.settled()
    assert [event.id for event in await office.billed()] == mortal.attempts[1:]


async def test_nobody_waits_for_a_dead_replica_beyond_its_deadline(open_office) -> None:
    office = open_office(MortalReplica(deaths=2))
    with pytest.raises(ReplicaUnavailable):
        await read(office.begin(priority=Priority(deadline_s=0.2)))
    with pytest.raises(DeadlinePassed):
        await read(office.begin(timeout_s=0.2))
    await office.settled()
    assert await office.billed() == []


async def test_who_leaves_while_a_replica_is_dead_is_not_billed(open_office) -> None:
    mortal = MortalReplica()
    office = open_office(mortal)
    delivery = office.begin()
    await asyncio.wait_for(mortal.awaited.wait(), 30)
    delivery.abandon()
    await office.settled()
    assert len(mortal.attempts) == 1
    assert await office.billed() == [] and office.services.limiter.settled == [None]


async def test_who_found_no_place_says_nothing_against_the_replica_and_tries_no_other(
    open_office,
) -> None:
    full, spare = ScriptedReplica("full", refuses=NoSlot("full")), ScriptedReplica("spare")
    office = open_office(full, spare)
    with pytest.raises(NoSlot):
        await read(office.begin())
    await office.settled()
    assert spare.attempts == [] and office.services.spool._open == {}
    full.refuses = None
    fleet = office.services.fleet
    assert fleet.order(fleet.routes[0])[0] is full, "it is not remembered as a failure"


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
    assert office.services.limiter.settled == [INPUT_TOKENS + 2], "billed tokens are not given back"


@pytest.mark.parametrize(
    "error",
    [
        ReplicaUnavailable("down"),
        NoSlot("its deadline passed while it waited"),
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
    assert office.services.limiter.settled == [None]


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
    monkeypatch.setattr(attempt_module, "ABORT_TIMEOUT_S", 0.05)
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
    assert office.services.fleet.routes[0].replicas[0].attempts == []


async def test_a_whole_answer_that_could_not_be_finished_is_the_houses_loss(open_office) -> None:
    office = open_office(ScriptedReplica(fails_after=(2, ReplicaLost("gone"))))
    with pytest.raises(ReplicaLost):
        await read(office.begin(stream=False))
    await office.settled()
    (event,) = await office.billed()
    assert (event.kind, event.quantities.output, event.finish) == ("waste", 2, "error")
    assert office.services.limiter.settled == [None]


async def test_whoever_leaves_a_whole_answer_pays_for_what_was_generated(open_office) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    office = open_office(replica)
    delivery = office.begin(stream=False)
    await asyncio.wait_for(replica.hangs.wait(), 30)
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


@pytest.mark.parametrize("stream", [True, False])
async def test_at_the_clients_deadline_it_is_cut_off_and_billed_as_if_the_client_had_left(
    open_office, stream: bool
) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    office = open_office(replica)
    encoder = PlainEncoder() if stream else SilentEncoder()
    delivery, whole = office.begin(stream=stream, encoder=encoder), b""
    await asyncio.wait_for(replica.hangs.wait(), 30)
    delivery.expire(DeadlinePassed("0.1 s are over"))
    with pytest.raises(DeadlinePassed) as late:
        while (chunk := await asyncio.wait_for(delivery.next(), 30)) is not None:
            whole += chunk
    assert whole == (b"w1 w2 " if stream else b""), "what came in time is read"
    failed = to_http_error(late.value)
    assert (failed.status, failed.body.code) == (504, "deadline_exceeded")
    assert failed.headers["x-should-retry"] == "false", "each try is billed"
    await office.settled()
    assert replica.aborted.is_set()
    (event,) = await office.billed()
    assert (event.kind, event.quantities.output, event.finish) == ("usage", 2, "disconnect")
    assert office.services.limiter.settled == [INPUT_TOKENS + 2]


async def test_a_deadline_that_passes_before_anything_ran_costs_nothing(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, may_prepare = ScriptedReplica(), asyncio.Event()
    prepare = replica.prepare

    async def slow(*asked: Any) -> PreparedRequest:
        await may_prepare.wait()
        return await prepare(*asked)

    monkeypatch.setattr(replica, "prepare", slow)
    office = open_office(replica)
    with pytest.raises(DeadlinePassed):
        await read(office.begin(timeout_s=0.01))
    may_prepare.set()
    await office.settled()
    assert replica.attempts == [] and await office.billed() == []


class SlowlyPrepared(ScriptedReplica):
    """Takes PREPARE_S before anything is asked, and notes for whom it then begins."""

    PREPARE_S = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.priorities: list[Priority] = []

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        await asyncio.sleep(self.PREPARE_S)
        return await super().prepare(request, priority, cache_salt)

    def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        self.priorities.append(priority)
        return super().stream(
            prepared, attempt_id=attempt_id, cache_salt=cache_salt, priority=priority
        )


async def test_a_replica_hears_what_is_left_of_the_deadline(open_office) -> None:
    replica = SlowlyPrepared()
    office = open_office(replica)
    assert await read(office.begin(priority=Priority(lane="agentic", deadline_s=1000.0)))
    assert await read(office.begin(priority=Priority()))
    (bound, unbound) = replica.priorities
    assert (bound.lane, unbound.deadline_s) == ("agentic", None)
    assert bound.deadline_s is not None and 500.0 < bound.deadline_s <= 1000.0 - replica.PREPARE_S


async def test_a_lanes_deadline_that_passes_while_it_is_prepared_asks_nobody(open_office) -> None:
    replica = SlowlyPrepared()
    office = open_office(replica)
    with pytest.raises(NoSlot):
        await read(office.begin(priority=Priority(deadline_s=replica.PREPARE_S / 2)))
    await office.settled()
    assert replica.priorities == [] and await office.billed() == []


async def test_what_would_come_too_late_is_refused_before_anything_is_reserved(
    open_office,
) -> None:
    replica = ScriptedReplica()
    replica.predicted_s = 12.5
    office = open_office(replica)
    with pytest.raises(ReplicaOverloaded) as refused:
        await read(office.begin(priority=Priority(deadline_s=10.0)))
    assert refused.value.retry_after_s == pytest.approx(2.5, abs=0.1)
    assert replica.attempts == [] and office.services.limiter.settled == []
    value, labels = office.telemetry.registry.get_sample_value, {"model": "m"}
    labels["lane"] = "interactive"
    assert value("tollgate_early_rejections_total", labels) == 1
    assert value("tollgate_early_rejections_tokens_total", labels) == INPUT_TOKENS
    assert await read(office.begin(priority=Priority(deadline_s=13.0))) == b"w1 w2 w3 [3]"
    assert await read(office.begin(priority=Priority())) == b"w1 w2 w3 [3]"


async def test_what_a_limit_refuses_was_sent_nowhere(open_office) -> None:
    engines = [ViewedScript("m/0"), ViewedScript("m/1")]
    office = open_office(*engines)
    with pytest.raises(RateLimited):
        await read(office.begin(Plan(name="tiny", tokens_per_minute=5)))
    assert [each.sent.total() for each in engines] == [0.0, 0.0]
    await read(office.begin())
    assert sorted(each.sent.total() > 0 for each in engines) == [False, True]


async def test_a_limiter_that_is_away_is_told_later(
    open_office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = open_office(ScriptedReplica())
    limiter = office.services.limiter
    delivery = office.begin()
    probe = limiter._scripts.probe

    async def away(*_: object) -> None:
        raise LimiterUnavailable("away")

    assert await delivery.next() is not None
    monkeypatch.setattr(limiter._scripts, "probe", away)
    while await delivery.next() is not None:
        continue
    async with asyncio.timeout(30):
        while not limiter._outage._deferred:
            await asyncio.sleep(0.01)
    assert limiter.settled == [INPUT_TOKENS + 3]
    monkeypatch.setattr(limiter._scripts, "probe", probe)
    async with asyncio.timeout(30):
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

    monkeypatch.setattr(office.services.spool, "close", broken)
    with pytest.raises(SpoolBroken):
        await read(office.begin())
    await office.settled()
    assert office.services.limiter.settled == [INPUT_TOKENS + 3]
