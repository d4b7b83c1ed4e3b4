"""Responses that run without their client: ended, failed, cancelled from anywhere, given up where
their worker is gone; each on the bill as what was generated, once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities
from billing.ingestion.ingest import ingest
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.fleet.errors import ReplicaLost
from gateway.ids import uuid7
from gateway.inference.calls import GenerationCall
from gateway.inference.generate import NotAccepting
from gateway.lanes import Priority
from gateway.principal import Principal
from gateway.request_errors import BadField, TooManyFollowed, TooManyInBackground
from gateway.request_log.tables import request_log
from gateway.request_log.writer import RequestLog
from gateway.responses import background as module
from gateway.responses import events as events_module
from gateway.responses import running
from gateway.responses import store as store_module
from gateway.responses.background import Background, StartableResponse
from gateway.responses.conversations import ConversationStore
from gateway.responses.events import EventRows
from gateway.responses.kept import ResponseOwner
from gateway.responses.lost import LostResponseLog
from gateway.responses.running import RunningRows
from gateway.responses.store import ResponseStore
from gateway.responses.tables import response_events
from gateway.responses.tables import responses as table
from gateway.secret import Cipher
from gateway.telemetry.request_meter import RequestMeter
from gateway.tenancy.errors import NotFound
from gateway.tenancy.tables import orgs, projects
from gateway.wire.openai_responses.answer import begun
from gateway.wire.openai_responses.from_responses import own_items, read_response, to_generate
from gateway.wire.openai_responses.to_responses import ResponseEncoder
from tests.billing.samples import an_attempt, an_event
from tests.gateway.inference.test_generate import open_office
from tests.gateway.office import PLAN, Office, ScriptedReplica
from tests.gateway.responses.test_store import LIFETIME_S, SECRET

__all__ = ["open_office"]
BODY = b'{"model": "m", "input": "hello", "background": true}'


class Stage:
    """An office, and what it keeps of responses; `workers` share the rows."""

    def __init__(self, pools: list[AsyncEngine], db: AsyncEngine) -> None:
        self.db = db
        self.pools: dict[str, Any] = {
            "db": pools[0],
            "system_db": pools[1],
            "cipher": Cipher(SECRET, "t"),
        }
        self.pools["conversations"] = ConversationStore(db=pools[0], cipher=Cipher(SECRET, "t"))
        self.store = ResponseStore(**self.pools, lifetime_s=LIFETIME_S)
        self.workers: list[Background] = []
        self.offices: list[Office] = []
        self.owner = ResponseOwner("", "proj_1")

    def worker(self, office: Office) -> Background:
        rows = RunningRows(**self.pools, lifetime_s=LIFETIME_S)
        events = EventRows(**self.pools, lifetime_s=LIFETIME_S)
        made = Background(office.services, rows, events)
        made.start()
        self.workers.append(made)
        return made

    async def tenant(self, office: Office) -> None:
        self.offices.append(office)
        self.owner = ResponseOwner(office.org, f"proj_{office.org}")
        async with self.db.begin() as conn:
            await conn.execute(sa.insert(orgs).values(id=office.org, name=office.org))
            row = {"id": self.owner.project_id, "org_id": office.org, "name": "p"}
            await conn.execute(sa.insert(projects).values(row))

    async def begin(self, office: Office, worker: Background) -> str:
        request = read_response(BODY)
        given = own_items(request, {})
        generate = msgspec.structs.replace(to_generate(request, given), stream=True)
        response_id = f"resp_{uuid7().hex}"
        response = begun(
            request, id=response_id, created_at=1, service_tier="default", status="queued"
        )
        encoder = ResponseEncoder(response, stream=True)
        principal = Principal(
            org_id=office.org,
            project_id=self.owner.project_id,
            key_id="key_1",
            key_hint="sk-tg-...",
            scopes=frozenset({"inference"}),
            key_plan=PLAN,
        )
        call = GenerationCall(
            priority=Priority(),
            request_id=response_id.replace("resp_", "req_"),
            principal=principal,
            request=generate,
            encoder=encoder,
            meter=RequestMeter(office.telemetry, "m"),
        )
        created = StartableResponse(
            call=call, encoder=encoder, owner=self.owner, given=given, in_background=True
        )
        answer = json.loads(await worker.run(created))
        assert answer["status"] == "queued" and answer["background"] is True
        return response_id

    async def answer(self, response_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.store.find(self.owner, response_id)).answer)
        return found

    async def until(self, response_id: str, *statuses: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while (found := await self.answer(response_id))["status"] not in statuses:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.01)
        return found


@pytest.fixture
async def stage(
    db: AsyncEngine, postgres_url: str, monkeypatch: pytest.MonkeyPatch, open_office: Any
) -> AsyncIterator[Stage]:
    """`open_office`: what runs ends while its limiter is still there."""
    monkeypatch.setattr(module, "BEAT_INTERVAL_S", 0.05)
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    stage = Stage(pools, db)
    yield stage
    for worker in stage.workers:
        for response_id in list(worker._running):
            worker.abandon(response_id)
        await worker.close()
    for office in stage.offices:
        await office.settled()
    for pool in pools:
        await pool.dispose()


Begin = Callable[..., Awaitable[tuple[Office, Background, str]]]


@pytest.fixture
def begin(stage: Stage, open_office: Any) -> Begin:
    async def begin(*replicas: ScriptedReplica) -> tuple[Office, Background, str]:
        office = open_office(*replicas)
        await stage.tenant(office)
        worker = stage.worker(office)
        return office, worker, await stage.begin(office, worker)

    return begin


async def test_it_ends_without_anybody_and_is_billed_once(stage: Stage, begin: Begin) -> None:
    office, _, response_id = await begin(ScriptedReplica())
    found = await stage.until(response_id, "completed", "failed")
    assert found["output"][0]["content"][0]["text"] == "w1 w2 w3 "
    assert found["usage"]["output_tokens"] == 3 and found["completed_at"] is not None
    await office.settled()
    [event] = await office.billed()
    assert (event.quantities.output, event.finish, event.kind) == (3, "done", "usage")


async def test_it_says_that_it_runs(stage: Stage, begin: Begin) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    _, worker, response_id = await begin(replica)
    found = await stage.until(response_id, "in_progress")
    assert found["output"] == [] and found["usage"] is None
    await worker._rows.cancel(stage.owner, response_id)
    worker.abandon(response_id)


async def test_what_fails_says_so_and_what_had_come_is_billed(stage: Stage, begin: Begin) -> None:
    office, _, response_id = await begin(ScriptedReplica(fails_after=(2, ReplicaLost("gone"))))
    found = await stage.until(response_id, "failed")
    assert found["error"]["code"] == "server_error"
    await office.settled()
    [event] = await office.billed()
    assert (event.quantities.output, event.kind) == (2, "usage")


async def test_what_is_refused_has_failed_and_costs_nothing(stage: Stage, begin: Begin) -> None:
    office, _, response_id = await begin(ScriptedReplica(refuses=BadField("no", param="input")))
    found = await stage.until(response_id, "failed")
    assert found["error"]["message"] == "no"
    await office.settled()
    assert await office.billed() == []


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_cancellation_ends_it_wherever_it_runs_and_bills_what_was_generated(
    stage: Stage, begin: Begin, elsewhere: bool
) -> None:
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, response_id = await begin(replica)
    await asyncio.wait_for(replica.hangs.wait(), 30)
    by = stage.worker(office) if elsewhere else worker
    shown = json.loads(await by.cancel(stage.owner, response_id))
    assert shown["status"] == "cancelled"
    await asyncio.wait_for(replica.aborted.wait(), 30)
    await office.settled()
    [event] = await office.billed()
    assert (event.quantities.output, event.finish, event.kind) == (2, "disconnect", "usage")
    assert (await stage.answer(response_id))["status"] == "cancelled"
    assert json.loads(await by.cancel(stage.owner, response_id))["status"] == "cancelled"


async def test_what_has_ended_stays_as_it_is(stage: Stage, begin: Begin) -> None:
    _, worker, response_id = await begin(ScriptedReplica())
    found = await stage.until(response_id, "completed")
    assert json.loads(await worker.cancel(stage.owner, response_id)) == found


async def test_what_nobody_works_on_any_more_has_failed(
    stage: Stage, begin: Begin, db: AsyncEngine
) -> None:
    """As a kill -9 leaves it; and a worker that was only frozen changes nothing any more."""
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, response_id = await begin(replica)
    await stage.until(response_id, "in_progress")
    await worker._beating.close()  # it is frozen
    old = sa.func.now() - sa.text("interval '1 minute'")
    async with db.begin() as conn:
        await conn.execute(sa.update(table).values(beat_at=old))
    stage.worker(office)
    found = await stage.until(response_id, "failed")
    assert found["error"]["code"] == "server_error"
    worker.abandon(response_id)
    await office.settled()
    assert (await stage.answer(response_id)) == found


async def test_one_whose_secret_was_removed_is_given_up_as_well(
    stage: Stage, begin: Begin, db: AsyncEngine
) -> None:
    """And keeps nobody else from it."""
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, gone = await begin(replica)
    other = await stage.begin(office, worker)
    for each in (gone, other):
        await stage.until(each, "in_progress")
    await worker._beating.close()  # it is frozen
    old = sa.func.now() - sa.text("interval '1 minute'")
    async with db.begin() as conn:
        await conn.execute(sa.update(table).values(beat_at=old))
        await conn.execute(sa.update(table).where(table.c.id == gone).values(secret_id="removed"))
    assert await worker._rows.give_up(1.0) == 2
    async with db.connect() as conn:
        assert set(await conn.scalars(sa.select(table.c.status))) == {"failed"}
    assert (await stage.answer(other))["status"] == "failed"


async def test_one_whose_worker_has_gone_is_in_the_log_of_requests_once(
    stage: Stage, begin: Begin, db: AsyncEngine
) -> None:
    """With what the books have of it by then, whatever its worker says when it is back."""
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, response_id = await begin(replica)
    await stage.until(response_id, "in_progress")
    await worker._beating.close()  # it is frozen
    request_id = response_id.replace("resp_", "req_")
    attempt = an_attempt(
        org=office.org, project=stage.owner.project_id, key="key_1", admitted_at=time.time()
    )
    attempt = msgspec.structs.replace(attempt, request_id=request_id)
    await ingest(db, [an_event(attempt, Quantities(uncached_input=3, output=2))])
    async with db.begin() as conn:
        old = sa.func.now() - sa.text("interval '1 minute'")
        await conn.execute(sa.update(table).values(beat_at=old))
    dropped: list[int] = []
    log = RequestLog(stage.pools["system_db"], keep_days=7, on_dropped=dropped.append)
    lost = LostResponseLog(log, office.telemetry.label)
    assert await worker._rows.give_up(1.0, lost.note) == 1
    assert await worker._rows.give_up(1.0, lost.note) == 0
    async with db.connect() as conn:
        rows = (await conn.execute(sa.select(request_log))).mappings().all()
        sums = (await conn.execute(sa.text("SELECT num_requests FROM requests_hourly"))).all()
    [row] = rows
    assert (f"req_{row['id'].hex}", row["org"], row["project"], row["key"]) == (
        *(request_id, office.org, stage.owner.project_id, "key_1"),
    )
    assert (row["status"], row["route"], row["lane"], row["error_code"]) == (
        *(500, "/v1/responses", "interactive", "server_error"),
    )
    assert (row["uncached_tokens"], row["output_tokens"]) == (3, 2) and row["cost_pico"] > 0
    assert row["duration_us"] > 0 and [*sums] == [(1,)] and dropped == []
    kept = await stage.store.find(stage.owner, response_id)
    assert kept.asked is None, "what has ended names nobody"


async def followed(
    stage: Stage, worker: Background, response_id: str, after: int = -1
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        async for some in await worker.follow(stage.owner, response_id, after):
            for each in some.split(b"\n\n")[:-1]:
                name, data = each.split(b"\n")
                events.append(json.loads(data.removeprefix(b"data: ")))
                assert events[-1]["type"] == name.removeprefix(b"event: ").decode()
    assert [each["sequence_number"] for each in events] == [
        after + 1 + index for index in range(len(events))
    ]
    return events


async def kept_events(stage: Stage, response_id: str, number: int) -> None:
    """Until so many are."""
    last = sa.select(sa.func.max(response_events.c.last_number))
    last = last.where(response_events.c.response_id == response_id)
    async with asyncio.timeout(30):
        while True:
            async with stage.db.connect() as conn:
                if (await conn.scalar(last) or 0) >= number:
                    return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", ["cancelled", "lost"])
async def test_its_events_are_followed_from_another_worker(
    stage: Stage, begin: Begin, db: AsyncEngine, ends: str
) -> None:
    """While it runs, and to its end, whatever that is."""
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, response_id = await begin(replica)
    other = stage.worker(office)
    following = asyncio.create_task(followed(stage, other, response_id))
    await kept_events(stage, response_id, 6)
    if ends == "cancelled":
        await other.cancel(stage.owner, response_id)
    else:
        await worker._beating.close()
        old = sa.func.now() - sa.text("interval '1 minute'")
        async with db.begin() as conn:
            await conn.execute(sa.update(table).values(beat_at=old))
        assert await other._rows.give_up(1.0) == 1
    events = await following
    assert [each["type"] for each in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    said = "".join(each.get("delta", "") for each in events)
    assert said == "w1 w2 "
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"] == await stage.answer(response_id)
    again = await followed(stage, worker, response_id, 4)
    assert again == events[5:]


async def test_of_its_events_the_newest_are_kept_and_then_its_end_alone(
    stage: Stage, begin: Begin, db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MAX_BYTES", 100)
    monkeypatch.setattr(module, "EVENTS_INTERVAL_S", 0.001)
    _, worker, response_id = await begin(ScriptedReplica(length=9, hangs_after=8))
    await kept_events(stage, response_id, 12)

    async def oldest() -> int:
        async with db.connect() as conn:
            found = await conn.scalar(sa.select(sa.func.min(response_events.c.first_number)))
        return found or 0

    async with asyncio.timeout(30):
        while True:  # until none was dropped while it was asked for
            first = await oldest()
            if first:
                with pytest.raises(BadField) as caught:
                    await worker.follow(stage.owner, response_id, first - 2)
                if await oldest() == first:
                    break
            await asyncio.sleep(0.01)
    assert caught.value.param == "starting_after" and f"from number {first} on" in str(caught.value)
    await worker.cancel(stage.owner, response_id)
    assert (await followed(stage, worker, response_id, first - 1))[-1]["type"] == "response.failed"
    async with db.begin() as conn:
        old = sa.func.now() - sa.text("interval '25 hours'")
        await conn.execute(sa.update(response_events).values(created_at=old))
    monkeypatch.setattr(store_module, "SWEEP_BATCH", 1)
    await stage.store.sweep()
    [event] = await followed(stage, worker, response_id)
    assert event["response"] == await stage.answer(response_id)


async def test_who_follows_goes_on_elsewhere_when_a_worker_leaves(
    stage: Stage, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    office, worker, response_id = await begin(ScriptedReplica(length=9, hangs_after=2))
    other = stage.worker(office)
    await kept_events(stage, response_id, 6)
    following = await other.follow(stage.owner, response_id)
    assert (await anext(following)).startswith(b"event: response.created")
    other.leave()
    async with asyncio.timeout(30):
        assert [each async for each in following if b"response.failed" in each] == []
    with pytest.raises(NotAccepting):
        await other.follow(stage.owner, response_id)
    owed = await other.follow(stage.owner, response_id, is_owed=True)
    assert (await anext(owed)).startswith(b"event: response.created")
    monkeypatch.setattr(module, "MAX_FOLLOWERS", 0)
    with pytest.raises(NotAccepting):
        await worker.follow(stage.owner, response_id)


async def test_an_org_follows_so_many_at_once(
    stage: Stage, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds for followers that come in the same moment; one that was refused, or has read
    nothing, holds no slot."""
    monkeypatch.setattr(module, "MAX_FOLLOWERS_OF_ORG", 2)
    _, worker, response_id = await begin(ScriptedReplica(length=9, hangs_after=2))
    with pytest.raises(NotFound):
        await worker.follow(stage.owner, "resp_nowhere")
    asked = (worker.follow(stage.owner, response_id) for _ in range(4))
    found = await asyncio.gather(*asked, return_exceptions=True)
    refused = [each for each in found if isinstance(each, BaseException)]
    assert [type(each) for each in refused] == [TooManyFollowed] * 2
    for each in found:
        if not isinstance(each, BaseException):
            await each.aclose()  # type: ignore[attr-defined]
    assert not worker._followed_of


async def test_it_says_at_once_that_it_is_queued(stage: Stage, begin: Begin) -> None:
    """Before any token: so whoever streams it knows its id."""
    _, worker, response_id = await begin(ScriptedReplica(length=9, hangs_after=0))
    following = await worker.follow(stage.owner, response_id)
    async with asyncio.timeout(30):
        some = await anext(following)
    assert some.count(b"event: response.queued") == 1 and response_id.encode() in some
    await worker.cancel(stage.owner, response_id)


async def test_what_was_written_and_not_heard_of_is_written_again_with_what_came(
    stage: Stage, begin: Begin
) -> None:
    """A commit whose answer is lost."""
    _, worker, response_id = await begin(ScriptedReplica(length=9, hangs_after=2))
    await kept_events(stage, response_id, 6)
    async with worker._writes:
        log = worker._logs[response_id]
        log.add(b"event: one\ndata: {}\n\n")
        some = log.take()
        assert some is not None
        async with stage.pools["system_db"].begin() as conn:
            await worker._events.add(conn, some)
        log.put_back(some)
        log.add(b"event: two\ndata: {}\n\n")
        await worker._events.write([log])
    following = await worker.follow(stage.owner, response_id, some.first - 1)
    async with asyncio.timeout(30):
        assert (await anext(following)).count(b"event: ") == 2
    await worker.cancel(stage.owner, response_id)


async def test_an_org_has_so_many_at_once(
    stage: Stage, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MAX_IN_BACKGROUND", 2)
    replica = ScriptedReplica(length=9, hangs_after=2)
    office, worker, first = await begin(replica)
    await stage.begin(office, worker)
    with pytest.raises(TooManyInBackground):
        await stage.begin(office, worker)
    await worker.cancel(stage.owner, first)
    await stage.begin(office, worker)
