"""A yes is for one call, once, and whoever asks does not give it."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mcp_bridge.errors import ApprovalRefused
from mcp_bridge.trust import approvals as module
from mcp_bridge.trust.approvals import (
    MAX_SHOWN_BYTES,
    Approval,
    Approvals,
    ApprovedCall,
    arguments_digest,
)
from tests.budget import examples
from tests.mcp_bridge.memory import MemoryApprovals

CALL = ApprovedCall(
    org_id="o",
    caller="key_1",
    server="mail",
    pin="sha256:aa",
    arguments_digest=arguments_digest({"to": "a@example.com", "body": "hi"}),
    policy_version="sha256:bb",
)


class Queue:
    """Approvals over memory, with a clock by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0
        ids, nonces = count(), count()
        self.store = MemoryApprovals()
        self.approvals = Approvals(
            self.store,
            now_s=lambda: self.now,
            new_id=lambda: f"a{next(ids)}",
            new_nonce=lambda: f"n{next(nonces)}",
        )

    async def asked(self) -> Approval:
        return await self.approvals.ask(CALL, ttl_s=60)

    async def approved(self) -> Approval:
        one = await self.asked()
        found = await self.approvals.decide("o", one.id, approve=True, by="admin")
        assert isinstance(found, Approval)
        return found

    async def use(self, one: Approval, call_id: str = "c1", **other: Any) -> object:
        call = msgspec.structs.replace(CALL, **other)
        return await self.approvals.use(one.id, call, nonce=one.nonce, call_id=call_id)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"to": "é", "id": 2**70}, b'{"to":"\xc3\xa9","id":1180591620717411303424}'),
        (
            {"body": "x" * (MAX_SHOWN_BYTES - 11)},
            b'{"body":"%b"}' % (b"x" * (MAX_SHOWN_BYTES - 11)),
        ),
        ({"body": "x" * (MAX_SHOWN_BYTES - 10)}, None),
        (None, None),
    ],
    ids=["plain", "longest", "too long", "not to be kept"],
)
async def test_the_arguments_go_along_for_who_decides(arguments: Any, kept: bytes | None) -> None:
    queue = Queue()
    one = await queue.approvals.ask(CALL, ttl_s=60, arguments=arguments)
    await queue.approvals.ask(CALL, ttl_s=60, arguments={"another": 1})
    assert queue.store.shown == ({} if kept is None else {one.id: kept})


async def test_it_is_used_once_and_by_its_continuation() -> None:
    queue = Queue()
    one = await queue.approved()
    first = await queue.use(one)
    assert isinstance(first, Approval) and first.used_by == "c1"
    assert await queue.use(one) == first
    assert await queue.use(one, "c2") == "used"
    queue.now += 3_600
    assert await queue.use(one) == first  # a call that is under way is not cut off
    assert [event.event for event in queue.store.events] == [
        "approval.requested", "approval.decided", "approval.used",
    ]  # fmt: skip
    assert [event.actor for event in queue.store.events] == ["key_1", "admin", "key_1"]


@pytest.mark.parametrize("field", [f for f in ApprovedCall.__struct_fields__ if f != "org_id"])
async def test_it_is_of_no_use_to_a_call_that_differs(field: str) -> None:
    queue = Queue()
    one = await queue.approved()
    assert await queue.use(one, **{field: "other"}) == "other_call"
    assert isinstance(await queue.use(one), Approval)


async def test_it_is_of_no_use_to_another_org_or_with_another_nonce() -> None:
    queue = Queue()
    one = await queue.approved()
    assert await queue.use(one, org_id="other") == "unknown"
    assert await queue.approvals.use(one.id, CALL, nonce="n", call_id="c") == "other_call"
    assert await queue.approvals.decide("other", one.id, approve=True, by="x") == "unknown"


async def test_arguments_that_differ_anywhere_have_another_digest() -> None:
    assert arguments_digest({"a": [1, {"b": "x"}]}) == arguments_digest({"a": [1, {"b": "x"}]})
    assert arguments_digest({"a": [1, {"b": "x"}]}) != arguments_digest(
        {"a": [1, {"b": "x\u200b"}]}
    )


def test_numbers_of_64_bits_are_told_apart_from_each_other_and_from_text() -> None:
    number = 2**63 + 1
    digests = {
        arguments_digest({"id": one})
        for one in (number, number + 1, -number, f"{number:x}", str(number), [number])
    }
    assert len(digests) == 6


async def test_who_asks_does_not_answer() -> None:
    queue = Queue()
    one = await queue.asked()
    assert await queue.approvals.decide("o", one.id, approve=True, by="key_1") == "own_request"
    assert await queue.use(one) == "pending"


async def test_who_asks_answers_where_the_rules_leave_it_to_it() -> None:
    """And what was left to it is of no use where they want an administrator's."""
    queue = Queue()
    left = msgspec.structs.replace(CALL, decider="caller")
    assert left.key() != CALL.key()
    one = await queue.approvals.ask(left, ttl_s=60)
    found = await queue.approvals.decide("o", one.id, approve=True, by="key_1")
    assert isinstance(found, Approval) and found.state == "approved"
    assert (await queue.asked()).id != one.id
    assert await queue.approvals.use(one.id, CALL, nonce=one.nonce, call_id="c") == "other_call"
    queue.now += 60
    late = await queue.approvals.look("o", one.id)
    assert late is not None and late.state == "expired"
    assert await queue.approvals.look("other", one.id) is None


async def test_a_no_stays_a_no() -> None:
    queue = Queue()
    one = await queue.asked()
    await queue.approvals.decide("o", one.id, approve=False, by="admin")
    assert await queue.approvals.decide("o", one.id, approve=True, by="admin") == "decided"
    assert await queue.use(one) == "denied"


async def test_it_expires_in_either_state_and_says_so_once() -> None:
    for approve in (True, False):
        queue = Queue()
        one = await queue.approved() if approve else await queue.asked()
        queue.now += 60
        if approve:
            assert await queue.use(one) == "expired"
            assert await queue.use(one) == "expired"
        assert await queue.approvals.decide("o", one.id, approve=True, by="b") in (
            "expired",
            "decided",
        )
        events = [event.event for event in queue.store.events]
        assert events.count("approval.expired") == 1


async def test_the_same_call_waits_once_and_the_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue()
    assert await queue.asked() == await queue.asked()
    monkeypatch.setattr(module, "MAX_PENDING", 1)
    with pytest.raises(ApprovalRefused, match="wait"):
        await queue.approvals.ask(msgspec.structs.replace(CALL, pin="sha256:cc"), ttl_s=60)
    other = await queue.approvals.ask(msgspec.structs.replace(CALL, org_id="other"), ttl_s=60)
    assert other.call.org_id == "other"  # one org's flood is not another's
    for ttl_s in (0, -1, 1e9):
        with pytest.raises(ApprovalRefused, match="lives"):
            await Queue().approvals.ask(CALL, ttl_s=ttl_s)


async def test_of_many_workers_that_use_it_one_does() -> None:
    queue = Queue()
    one = await queue.approved()
    found = await asyncio.gather(*(queue.use(one, f"c{n}") for n in range(20)))
    assert sum(isinstance(outcome, Approval) for outcome in found) == 1
    assert [outcome for outcome in found if isinstance(outcome, str)] == ["used"] * 19
    assert [event.event for event in queue.store.events].count("approval.used") == 1


class ApprovalMachine(RuleBasedStateMachine):
    """A machine that asks, decides, uses and waits for approvals in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self.asked: list[Approval] = []
        self.yes: dict[str, float] = {}
        self.calls: dict[str, set[str]] = {}

    def one(self, number: int) -> Approval | None:
        return self.asked[number % len(self.asked)] if self.asked else None

    # An approval first: chance alone would hardly ever get as far as one that is used.
    @initialize()
    def begin(self) -> None:
        self.ask()
        self.decide(0, True, "admin")

    @rule()
    def ask(self) -> None:
        one = asyncio.run(self.queue.asked())
        if one.id not in {other.id for other in self.asked}:
            self.asked.append(one)

    @rule(
        number=st.integers(0, 2),
        approve=st.sampled_from([True, True, False]),
        by=st.sampled_from(["admin", "admin", "key_1"]),
    )
    def decide(self, number: int, approve: bool, by: str) -> None:
        if one := self.one(number):
            found = asyncio.run(self.queue.approvals.decide("o", one.id, approve=approve, by=by))
            if isinstance(found, Approval):
                assert by == "admin" and self.queue.now < one.expires_at_s
                assert one.id not in self.yes
                self.yes[one.id] = self.queue.now if approve else -1

    @rule(
        number=st.integers(0, 2),
        call=st.sampled_from("xy"),
        pin=st.sampled_from([CALL.pin, CALL.pin, "other"]),
    )
    def use(self, number: int, call: str, pin: str) -> None:
        if one := self.one(number):
            found = asyncio.run(self.queue.use(one, call, pin=pin))
            if isinstance(found, Approval):
                assert pin == CALL.pin and self.yes.get(one.id, -1) >= 0
                assert call in self.calls.get(one.id, ()) or self.queue.now < one.expires_at_s
                self.calls.setdefault(one.id, set()).add(call)

    @rule(seconds=st.sampled_from([1, 1, 30, 61]))
    def wait(self, seconds: int) -> None:
        self.queue.now += seconds

    @invariant()
    def each_is_used_by_one_call(self) -> None:
        assert all(len(calls) == 1 for calls in self.calls.values())

    @invariant()
    def every_transition_has_one_event(self) -> None:
        seen = [(event.approval_id, event.event) for event in self.queue.store.events]
        assert len(seen) == len(set(seen))
        ended = {"used": 3, "denied": 2, "approved": 2, "pending": 1}
        for one in self.queue.store.rows.values():
            mine = [event for who, event in seen if who == one.id]
            assert len(mine) == ended.get(one.state, len(mine)) and len(mine) <= 3


TestApprovals = ApprovalMachine.TestCase
TestApprovals.settings = settings(max_examples=examples(150), stateful_step_count=20, deadline=None)
