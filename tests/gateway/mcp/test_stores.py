"""Approvals and calls that wait for a person belong to one tenant in Postgres and Redis, and all
workers are told of them."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.mcp.approvals import PostgresApprovals, count_waiting, list_approvals
from gateway.mcp.calls import PARTS, TAINT_S, RedisCalls, Taint, lift, taints_of
from gateway.mcp.known import CachedTrust, ChangeFeed, announce
from gateway.mcp.pins import approve_changes, read_pins, revoke_pins
from gateway.mcp.records import masked
from gateway.mcp.rules import replace_rules
from gateway.tenancy.errors import InvalidField, NotFound
from mcp_bridge.caller import Caller
from mcp_bridge.pinning import ApprovedPins, Change, compare, offer_of
from mcp_bridge.trust.approvals import (
    Approval,
    Approvals,
    ApprovalTransition,
    ApprovedCall,
    decided,
    requested,
)
from mcp_bridge.trust.policy import CallLimit, CallState, SpendLimit, ToolRule
from tests.budget import examples

TOOL: Any = {"name": "add", "inputSchema": {"type": "object"}}
CHANGES = compare(ApprovedPins(), offer_of([("tool", TOOL)]))


async def approve(
    tenant_db: AsyncEngine, org_id: str, changes: tuple[Change, ...] = CHANGES
) -> None:
    async with tenant(tenant_db, org_id) as conn:
        await approve_changes(
            conn, org_id=org_id, server="s", pin_changes=changes, actor=COMMAND_LINE
        )


async def test_what_is_approved_is_one_orgs_and_comes_back_to_the_byte(
    tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    alice, mallory = orgs
    await approve(tenant_db, alice)
    async with tenant(tenant_db, alice) as conn:
        found = await read_pins(conn, org_id=alice, server="s")
        assert [one.state for one in compare(found, offer_of([("tool", TOOL)]))] == ["unchanged"]
        assert (await read_pins(conn, org_id=alice, server="other")).pins == {}
    changed = offer_of([("tool", {**TOOL, "name": "sum"})])
    (renamed,) = compare(found, changed)
    await approve(tenant_db, alice, (renamed,))
    async with tenant(tenant_db, alice) as conn:
        assert (await read_pins(conn, org_id=alice, server="s")).pins.keys() == {("tool", "sum")}
        gone = {"org_id": alice, "server": "s", "keys": [("tool", "sum")]}
        await revoke_pins(conn, **gone, actor=COMMAND_LINE)
        with pytest.raises(NotFound):
            await revoke_pins(conn, **gone, actor=COMMAND_LINE)
    async with tenant(tenant_db, mallory) as conn:
        assert (await read_pins(conn, org_id=mallory, server="s")).pins == {}


async def test_a_worker_knows_a_change_once_it_is_announced(
    tenant_db: AsyncEngine, orgs: list[str], redis: Redis
) -> None:
    feed = ChangeFeed(redis)
    known = CachedTrust(tenant_db, feed)
    await feed.start()
    try:
        before = await known.approved(orgs[0], "s")
        assert before.pins == {} and await known.approved(orgs[0], "s") is before
        await approve(tenant_db, orgs[0])
        await announce(redis, orgs[0])
        async with asyncio.timeout(30):
            while not (await known.approved(orgs[0], "s")).pins:
                await asyncio.sleep(0.01)
        assert (await known.approved(orgs[1], "s")).pins == {}
    finally:
        await feed.close()


async def test_rules_are_replaced_as_a_whole_or_refused_by_name(
    tenant_db: AsyncEngine, orgs: list[str], redis: Redis
) -> None:
    known = CachedTrust(tenant_db, ChangeFeed(redis))
    assert [rule.id for rule in (await known.rules(orgs[0])).rules] == ["default"]
    bad = {
        "rules.a.when": ToolRule(id="a", effect="deny", when="args."),
        "rules.a.budget": ToolRule(id="a", effect="allow", budget=SpendLimit(1, 0)),
        "rules.a.of": ToolRule(id="a", effect="allow", level="key"),
    }
    for field, rule in bad.items():
        async with tenant(tenant_db, orgs[0]) as conn:
            with pytest.raises(InvalidField) as refused:
                await replace_rules(conn, org_id=orgs[0], rules=[rule], actor=COMMAND_LINE)
        assert refused.value.param == field
    async with tenant(tenant_db, orgs[0]) as conn:
        made = await replace_rules(
            conn,
            org_id=orgs[0],
            rules=[ToolRule(id="a", effect="ask")],
            actor=COMMAND_LINE,
        )
    fresh = CachedTrust(tenant_db, ChangeFeed(redis))
    assert (await fresh.rules(orgs[0])).version == made.version
    assert (await fresh.rules(orgs[1])).version != made.version


def asked(org_id: str, approval_id: str, arguments: str = "sha256:1") -> ApprovalTransition:
    call = ApprovedCall(
        org_id=org_id,
        caller="a\nb\nc\nd",
        server="s",
        pin="sha256:0",
        arguments_digest=arguments,
        policy_version="1",
    )
    return requested(call, approval_id=approval_id, nonce="n", now_s=100, ttl_s=60)


async def test_a_call_that_is_asked_for_at_once_has_one_approval_and_keeps_its_no(
    tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    ids = count()
    queue = Approvals(
        PostgresApprovals(tenant_db),
        now_s=lambda: 100.0,
        new_id=lambda: f"one-{next(ids)}",
        new_nonce=lambda: "n",
    )
    for decider, again in (("administrator", "denied"), ("caller", "pending")):
        given = asked(orgs[0], "x", f"sha256:{decider}").approval.call
        call = msgspec.structs.replace(given, decider=decider)
        found = await asyncio.gather(*(queue.ask(call, ttl_s=60) for _ in range(4)))
        assert len({each.id for each in found}) == 1
        no = await queue.decide(orgs[0], found[0].id, approve=False, by="bob")
        assert isinstance(no, Approval) and no.state == "denied"
        assert (await queue.ask(call, ttl_s=60)).state == again


async def test_an_approval_changes_once_and_is_one_orgs(
    tenant_db: AsyncEngine, orgs: list[str]
) -> None:
    alice, mallory = orgs
    store = PostgresApprovals(tenant_db)
    new = asked(alice, "one")
    assert await store.insert(alice, new, max_pending=1)
    assert not await store.insert(alice, asked(alice, "two", "sha256:2"), max_pending=1)
    key = new.approval.call.key()
    assert await store.waiting(alice, key, 110) == new.approval
    assert await store.waiting(alice, key, 160) is None
    for found in (await store.get(mallory, "one"), await store.waiting(mallory, key, 110)):
        assert found is None
    answers = [decided(new.approval, approve=yes, by="bob", now_s=110) for yes in (True, False)]
    assert all(isinstance(each, ApprovalTransition) for each in answers)
    assert not await store.replace(mallory, new.approval, answers[0])  # type: ignore[arg-type]
    done = await asyncio.gather(
        *(store.replace(alice, new.approval, each) for each in answers)  # type: ignore[arg-type]
    )
    assert sorted(done) == [False, True]
    async with tenant(tenant_db, alice) as conn:
        listed = await list_approvals(conn, org_id=alice)
    assert len(listed) == int(done[0])


async def test_what_waits_is_counted_by_server_over_all_orgs(
    tenant_db: AsyncEngine, system_db: AsyncEngine, orgs: list[str]
) -> None:
    store = PostgresApprovals(tenant_db)
    before = await count_waiting(system_db, 130)
    for org in orgs:
        assert await store.insert(org, asked(org, "one"), max_pending=9)
    assert await store.insert(orgs[0], asked(orgs[0], "two", "sha256:2"), max_pending=9)
    after = decided(asked(orgs[0], "two", "sha256:2").approval, approve=True, by="b", now_s=110)
    assert isinstance(after, ApprovalTransition)
    assert await store.replace(orgs[0], asked(orgs[0], "two", "sha256:2").approval, after)
    assert (await count_waiting(system_db, 130))["s"] - before.get("s", 0) == 2
    assert await count_waiting(system_db, 1e12) == {}, "their time is over"


async def test_workers_count_calls_together_in_a_window_that_slides(redis: Redis) -> None:
    now = [1000.0]
    first, second = (RedisCalls(redis, now_s=lambda: now[0]) for _ in range(2))
    rules = [
        ToolRule(id="few", effect="allow", rate=CallLimit(calls=2, window_s=60)),
        ToolRule(id="many", effect="allow", rate=CallLimit(calls=9, window_s=60)),
        ToolRule(id="any", effect="allow"),
    ]
    taken = await asyncio.gather(*(first.take("org_a", rules, f"{n}", 0) for n in range(5)))
    assert sum(each.full is None for each in taken) == 2
    assert (await second.take("org_a", rules, "x", 0)).full == CallState(calls={"few": 2})
    assert (await second.take("org_b", rules, "x", 0)).full is None
    assert (await second.take("org_a", rules[1:], "y", 0)).full is None
    now[0] += 61
    assert (await second.take("org_a", rules, "z", 0)).full is None


steps = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
    st.tuples(st.just("fail"), st.integers(0, 9)),
)


@given(st.lists(steps, max_size=12), st.integers(0, 12))
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
async def test_a_budget_is_never_passed_in_any_window(
    redis: Redis, found: list[tuple[str, int]], most: int
) -> None:
    """No window passes its budget, whatever calls cost; failed calls cost nothing; a refused call
    would have passed the budget, but for what was spent at most a part of the window before it
    began."""
    await redis.flushdb()
    now, window_s = [1e9], 60
    memory = RedisCalls(redis, now_s=lambda: now[0])
    rules = [ToolRule(id="b", effect="allow", budget=SpendLimit(most * 1000, window_s))]
    spent: list[tuple[float, int]] = []

    def sum_since(start: float) -> int:
        return sum(cost for at, cost in spent if at > start)

    for number, (kind, amount) in enumerate(found):
        if kind == "wait":
            now[0] += amount
            continue
        taken = await memory.take("org_a", rules, str(number), amount * 1000)
        if taken.full is not None:
            late = sum_since(now[0] - window_s - window_s / PARTS)
            assert taken.full.spent_pico == {"b": most * 1000}
            assert late >= most or late + amount > most
        elif kind == "fail":
            await memory.give_back("org_a", rules, amount * 1000, taken)
        else:
            spent.append((now[0], amount))
            assert sum_since(now[0] - window_s) <= most


async def test_taint_and_a_state_are_of_one_caller_and_org(redis: Redis) -> None:
    calls = RedisCalls(redis)
    alice = Caller(org_id="org_a", project_id="p", subject="s", client="c")
    bob = msgspec.structs.replace(alice, subject="bob")
    await calls.taint(alice, "web")
    assert await calls.tainted_by(alice) == ("web",) and await calls.tainted_by(bob) == ()
    assert await calls.once("org_a", "k", 60)
    assert not await calls.once("org_a", "k", 60)
    assert await calls.once("org_b", "k", 60)


async def test_a_taint_is_seen_and_lifted_by_the_client(redis: Redis) -> None:
    now = [1000.0]
    calls = RedisCalls(redis, now_s=lambda: now[0])
    alice = Caller(org_id="org_a", project_id="p", subject="alice", client="app")
    bob = msgspec.structs.replace(alice, subject="bob")
    other = msgspec.structs.replace(alice, client="other")
    for caller, server in ((alice, "web"), (alice, "mail"), (bob, "web"), (other, "web")):
        await calls.taint(caller, server)
        now[0] += 1
    await calls.taint(msgspec.structs.replace(alice, org_id="org_b"), "web")

    async def shown(**of: Any) -> list[Taint]:
        return await taints_of(redis, org_id="org_a", now_s=now[0], **of)

    assert [each.caller for each in await shown()] == [other, bob, alice]
    found = await shown(client="app")
    assert [each.caller for each in found] == [bob, alice]
    assert found[1].servers == ("mail", "web") and found[1].until_s == 1001 + TAINT_S
    await lift(redis, org_id="org_a", taints=found)
    assert await calls.tainted_by(alice) == () == await calls.tainted_by(bob)
    assert [each.caller for each in await shown()] == [other]
    assert await taints_of(redis, org_id="org_b", now_s=now[0]) != []
    now[0] += TAINT_S
    assert await shown() == []


async def test_so_many_who_are_tainted_are_kept_by_name(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.mcp.calls.MAX_TAINTED", 3)
    now = [1000.0]
    calls = RedisCalls(redis, now_s=lambda: now[0])
    for n in range(5):
        await calls.taint(Caller(org_id="o", project_id="p", subject="s", client=str(n)), "web")
        now[0] += 1
    kept = await taints_of(redis, org_id="o", now_s=now[0])
    assert [each.caller.client for each in kept] == ["4", "3", "2"]


def test_a_name_of_any_length_can_be_recorded() -> None:
    assert masked("add") == "add"
    assert len(masked("x" * 10_000)) == 256
