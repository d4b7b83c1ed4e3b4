"""A call holds what it needs before it goes out, and leaves nothing behind if its caller leaves
before that."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from mcp_bridge.protocol.rpc import INTERNAL_ERROR
from mcp_bridge.routing.guard import Outcome
from mcp_bridge.trust.call_records import CallRecord, CountOutcome, ReadRecord, Ticket
from mcp_bridge.trust.policy import SpendLimit, ToolRule
from tests.mcp_bridge import memory as kept
from tests.mcp_bridge.test_hostile import Server, whole
from tests.mcp_bridge.trust.test_trust import World, bridge_of


class Paid(msgspec.Struct):
    """A Ticket, and its Meter."""

    cost_pico: int = 7

    async def admit(self, call: CallRecord) -> Ticket:
        return self

    async def count(self, read: ReadRecord) -> None:
        """Count nothing: it does not matter here."""

    async def begun(self) -> None:
        """Nothing to keep."""

    async def ended(self, outcome: Outcome | None) -> bool:
        return outcome == "done"


@pytest.mark.parametrize("full", [False, True])
async def test_who_leaves_while_a_budget_is_asked_leaves_nothing_in_it(
    redis: Redis, full: bool
) -> None:
    world = World()
    taken, may_go_on = asyncio.Event(), asyncio.Event()

    class SlowCalls(kept.MemoryCalls):
        async def take(self, *given: Any) -> CountOutcome:
            found = await super().take(*given)
            taken.set()
            await may_go_on.wait()
            return found

    budget = SpendLimit(amount_pico=5 if full else 100, window_s=60)
    world.rules.now = kept.MemoryRules(ToolRule(id="b", effect="allow", budget=budget)).now
    world.guard.ports.meter, world.guard.ports.memory = Paid(), (memory := SlowCalls())
    async with bridge_of(world, redis):
        await world.approve()
        call = asyncio.create_task(world.call())
        await taken.wait()
        assert memory.spent.get(("org_a", "b"), 0) == (0 if full else 7)
        call.cancel()
        await asyncio.wait({call})
        may_go_on.set()
        await world.guard.close()
        assert memory.spent.get(("org_a", "b"), 0) == 0
        assert not world.went_out
        if not full:
            assert "result" in await world.call()
            assert memory.spent["org_a", "b"] == 7


class Broken(World):
    """Its server fails each call."""

    def answer(self, server: Server, writer: Any, message: Any) -> bytes:
        if message["method"] != "tools/call":
            return super().answer(server, writer, message)
        error = {"code": INTERNAL_ERROR, "message": "broken"}
        return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})


class SlowlyPaid(Paid):
    """Takes some turns of the loop to end a call."""

    outcomes: list[Outcome | None] = []

    async def ended(self, outcome: Outcome | None) -> bool:
        for _ in range(100):
            await asyncio.sleep(0)
        self.outcomes.append(outcome)
        return outcome == "done"


@pytest.mark.parametrize("goes_out", [True, False])
async def test_what_failed_holds_nothing_once_its_caller_is_told(
    redis: Redis, goes_out: bool
) -> None:
    world, paid = Broken(), SlowlyPaid()
    budget = SpendLimit(amount_pico=100 if goes_out else 5, window_s=60)
    world.rules.now = kept.MemoryRules(ToolRule(id="b", effect="allow", budget=budget)).now
    world.guard.ports.meter = paid
    async with bridge_of(world, redis):
        await world.approve()
        assert "error" in await world.call()
        assert paid.outcomes == (["failed"] if goes_out else [None])
        assert bool(world.went_out) == goes_out
        assert world.memory.spent.get(("org_a", "b"), 0) == 0


@pytest.mark.parametrize("keeps_nothing", [False, True])
async def test_who_decides_is_shown_the_arguments_of_who_keeps_some(
    redis: Redis, keeps_nothing: bool
) -> None:
    world = World()
    world.caller = msgspec.structs.replace(world.caller, keeps_nothing=keeps_nothing)
    world.rules.now = kept.MemoryRules(ToolRule(id="ask", effect="ask")).now
    async with bridge_of(world, redis):
        await world.approve()
        asked = (await world.call())["error"]["data"]
    shown = {} if keeps_nothing else {asked["approvalId"]: b'{"city":"Rome"}'}
    assert asked["reason"] == "approval_required" and world.waiting.shown == shown
