"""An upstream that takes only so many requests at once, on real sockets: the others wait, by lane
and tenant, as long as their deadlines say, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing

import pytest

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane
from gateway.fleet.errors import NoSlot, ReplicaUnavailable
from gateway.fleet.router import Fleet, Route
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.fleet.waiting_room import WaitingRoom
from gateway.generate_request import GenerateRequest
from gateway.generation_events import ReplicaEvent
from gateway.lanes import Priority
from tests.gateway.fleet.upstream.scripted_upstream import (
    COUNTED,
    Exchange,
    Upstream,
    completion,
    good_stream,
)

Make = Callable[..., UpstreamReplica]
Chat = Callable[..., GenerateRequest]


async def ask(
    replica: UpstreamReplica, request: GenerateRequest, name: str, priority: Priority
) -> list[ReplicaEvent]:
    prepared = await replica.prepare(request)
    stream = replica.stream(prepared, attempt_id=name, cache_salt="", priority=priority)
    async with aclosing(stream):
        return [event async for event in stream]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


class Gate:
    """Answers what it holds when it is told to."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.num_open = self.most_open = 0

    async def __call__(self, exchange: Exchange) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await self.opened.wait()
        self.num_open -= 1
        await (good_stream if exchange.body.get("stream") else whole)(exchange)


async def whole(exchange: Exchange) -> None:
    await exchange.answer(completion())


@pytest.mark.parametrize("stream", [False, True])
async def test_lanes_are_served_sixteen_to_four_to_one_and_never_more_than_the_bound(
    upstream: Upstream, make_replica: Make, chat: Chat, stream: bool
) -> None:
    room = WaitingRoom(2)
    replica = make_replica(room=room)
    gate = upstream.script = Gate()
    numbers: dict[Lane, int] = {"batch": 40, "agentic": 60, "interactive": 200}
    asked = [
        asyncio.create_task(
            ask(
                replica,
                chat(stream=stream, user=lane),
                f"{lane}-{n}",
                Priority(lane=lane, tenant="t"),
            )
        )
        for lane, number in numbers.items()
        for n in range(number)
    ]
    await until(lambda: sum(room.num_waiting.values()) == 298)
    await until(lambda: gate.num_open == 2)
    gate.opened.set()
    for answer in await asyncio.gather(*asked):
        assert answer[-1].finished and answer[-1].usage == COUNTED
    assert gate.most_open == 2
    order = [exchange.body["user"] for exchange in upstream.exchanges]
    for rounds in (2, 5, 8):
        served = Counter(order[: 21 * rounds])
        for lane, weight in LANE_WEIGHTS.items():
            assert abs(served[lane] - weight * rounds) <= 3, (rounds, served)
    room.check_integrity()
    assert room.backlog == 0.0


async def test_a_deadline_that_passes_while_it_waits_asks_nobody(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    room = WaitingRoom(1)
    replica = make_replica(room=room)
    gate = upstream.script = Gate()
    first = asyncio.create_task(ask(replica, chat(stream=True), "first", Priority()))
    await until(lambda: upstream.exchanges)
    with pytest.raises(NoSlot) as refused:
        await ask(replica, chat(stream=True), "late", Priority(deadline_s=0.05))
    assert refused.value.retry_after_s == 1.0
    assert sum(room.num_waiting.values()) == 0 and len(upstream.exchanges) == 1
    waiter = asyncio.create_task(
        ask(replica, chat(stream=True), "in time", Priority(deadline_s=60))
    )
    await until(lambda: sum(room.num_waiting.values()))
    await asyncio.sleep(0.05)
    gate.opened.set()
    assert (await first)[-1].usage == COUNTED
    events = await waiter
    assert events[-1].usage == COUNTED
    waits = [event.queue_time_s for event in events]
    assert waits[0] is not None and 0.05 <= waits[0] < 60 and set(waits[1:]) == {None}
    assert room.backlog == 0.0 and replica.health().num_running == 0


async def test_who_leaves_while_waiting_frees_the_slot_and_costs_nothing(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    room = WaitingRoom(1)
    replica = make_replica(room=room)
    gate = upstream.script = Gate()
    first = asyncio.create_task(ask(replica, chat(), "first", Priority()))
    await until(lambda: upstream.exchanges)
    waiters = [
        asyncio.create_task(ask(replica, chat(), name, Priority())) for name in ("b", "c", "d")
    ]
    await until(lambda: room.num_waiting["interactive"] == 3)
    await replica.abort("b")
    (left,) = await waiters[0]
    assert left.finished and left.usage is None, "nothing ran, nothing is billed"
    waiters[1].cancel()
    await asyncio.gather(waiters[1], return_exceptions=True)
    assert room.num_waiting["interactive"] == 1
    await replica.abort("first")
    assert (await first)[-1].finished
    gate.opened.set()
    assert (await waiters[2])[-1].usage == COUNTED, "the slot that came free was its"
    assert len(upstream.exchanges) == 2 and room.backlog == 0.0
    room.check_integrity()


async def test_random_leavers_leave_an_empty_room(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    """Cut off, cancelled and late, at any moment, waiting or served."""
    rng = random.Random(2)

    async def takes_its_time(exchange: Exchange) -> None:
        await asyncio.sleep(rng.random() * 0.004)
        await (good_stream if exchange.body.get("stream") else whole)(exchange)

    upstream.script = takes_its_time
    room = WaitingRoom(3)
    replica = make_replica(room=room)
    ended: Counter[str] = Counter()

    async def client(name: str) -> None:
        priority = Priority(
            lane=rng.choice(sorted(LANE_WEIGHTS)),
            tenant=rng.choice("ab"),
            deadline_s=rng.choice([None, None, 0.01]),
        )
        asking = asyncio.create_task(ask(replica, chat(stream=rng.random() < 0.5), name, priority))
        how = rng.choice(["stays", "is cut off", "is cancelled"])
        if how != "stays":
            await asyncio.sleep(rng.random() * 0.05)
            ended[f"{how} {'too late' if asking.done() else 'in time'}"] += 1
            await replica.abort(name) if how == "is cut off" else asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        room.check_integrity()
        if isinstance(outcome, list):
            assert outcome[-1].finished
            ended["had an answer" if outcome[-1].usage == COUNTED else "had none"] += 1
        else:
            assert isinstance(outcome, NoSlot | asyncio.CancelledError), repr(outcome)
            ended[type(outcome).__name__] += 1

    for wave in range(8):
        await asyncio.gather(*(client(f"{wave}-{number}") for number in range(40)))
        assert sum(room.num_waiting.values()) == sum(room.num_served.values()) == 0
        assert room.backlog == 0.0 and replica._attempts == {}
    wanted = ("NoSlot", "CancelledError", "had an answer", "had none", "is cut off in time")
    assert min(ended[each] for each in wanted) > 10, ended


async def test_what_waits_here_is_what_is_predicted(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    priority, room = Priority(), WaitingRoom(1)
    bounded, free = make_replica(room=room), make_replica()
    prepared = await bounded.prepare(chat())
    assert free.predicted_ttft_s(prepared, priority) is None, "nothing waits here, nobody knows"
    upstream.script = whole
    await ask(bounded, chat(), "a", priority)
    assert bounded.predicted_ttft_s(prepared, priority) == 0.0
    held = room.join(priority, 1)
    predicted = bounded.predicted_ttft_s(prepared, priority)
    assert predicted is not None and 0.0 < predicted < 30.0, "as long as the one before took"
    room.leave(held)


async def test_an_upstream_that_fails_gives_its_slot_back(
    upstream: Upstream, make_replica: Make, chat: Chat
) -> None:
    async def dies(exchange: Exchange) -> None:
        exchange.writer.close()

    room = WaitingRoom(1)
    replica = make_replica(room=room)
    upstream.script = dies
    for name in ("a", "b"):
        with pytest.raises(ReplicaUnavailable):
            await ask(replica, chat(stream=True), name, Priority())
    assert room.backlog == 0.0


async def test_of_several_replicas_the_one_where_least_waits_is_first(
    upstream: Upstream, make_replica: Make
) -> None:
    rooms = [WaitingRoom(1), WaitingRoom(2)]
    busy, free = (make_replica(name=f"r/{n}", room=room) for n, room in enumerate(rooms))
    fleet = Fleet([route := Route(model="big", kind="upstream", replicas=(busy, free))])
    rooms[0].join(Priority(), 1)
    assert {fleet.order(route)[0] for _ in range(20)} == {free}
    for _ in range(5):
        rooms[1].join(Priority(), 1)
    assert {fleet.order(route)[0] for _ in range(20)} == {busy}
    assert busy.health().backlog == 1.0 and free.health().num_waiting == 3
