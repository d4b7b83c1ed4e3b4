"""Keeps in memory what the bridge's guard remembers and where it is recorded: for tests of the
guard. The gateway's own, in Postgres and Redis, have theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.pinning import ApprovedPins, Change, approve
from mcp_bridge.routing.guard import Outcome
from mcp_bridge.trust.approvals import Approval, ApprovalEvent, ApprovalTransition
from mcp_bridge.trust.call_records import (
    CallRecord,
    CountOutcome,
    Denial,
    ReadRecord,
    Rules,
    Ticket,
)
from mcp_bridge.trust.policy import CallState, ToolRule, is_spent


class MemoryApprovals:
    """An ApprovalStore in memory, with the events that it would have logged."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Approval] = {}
        self.events: list[ApprovalEvent] = []
        self.shown: dict[str, bytes] = {}

    async def insert(
        self,
        org_id: str,
        new: ApprovalTransition,
        *,
        max_pending: int,
        arguments: bytes | None = None,
    ) -> Approval | None:
        at_s = new.approval.requested_at_s
        waiting = await self.waiting(org_id, new.approval.call.key(), at_s)
        if waiting is not None:
            return waiting
        pending = [
            one for (org, _), one in self.rows.items() if org == org_id and one.state == "pending"
        ]
        if len(pending) >= max_pending:
            return None
        self.rows[org_id, new.approval.id] = new.approval
        if arguments is not None:
            self.shown[new.approval.id] = arguments
        self.events.append(new.event)
        return new.approval

    async def get(self, org_id: str, approval_id: str) -> Approval | None:
        await asyncio.sleep(0)  # as where there is a network between: others come in between
        return self.rows.get((org_id, approval_id))

    async def waiting(self, org_id: str, key: str, now_s: float) -> Approval | None:
        stands = {"approved": 0, "pending": 1}
        found = [
            one
            for (org, _), one in self.rows.items()
            if org == org_id and one.call.key() == key and now_s < one.expires_at_s
            if one.state in stands
            or (one.state == "denied" and one.call.decider == "administrator")
        ]
        return min(found, key=lambda one: (stands.get(one.state, 2), one.id), default=None)

    async def replace(self, org_id: str, before: Approval, after: ApprovalTransition) -> bool:
        await asyncio.sleep(0)
        if self.rows.get((org_id, before.id)) != before:
            return False
        self.rows[org_id, before.id] = after.approval
        self.events.append(after.event)
        return True


class MemoryRules:
    """A RuleSource in memory."""

    def __init__(self, *rules: ToolRule) -> None:
        self.now = Rules.of(rules)

    async def rules(self, org_id: str) -> Rules:
        return self.now


class MemoryCalls:
    """A CallMemory in memory; nothing in it ends."""

    taints = True

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.spent: dict[tuple[str, str], int] = {}
        self.tainted: dict[str, list[str]] = {}
        self.seen: set[tuple[str, str]] = set()

    async def take(
        self, org_id: str, rules: Iterable[ToolRule], call_id: str, cost_pico: int
    ) -> CountOutcome:
        bound = list(rules)
        calls = {rule.id: self.counts.get((org_id, rule.id), 0) for rule in bound}
        spent = {rule.id: self.spent.get((org_id, rule.id), 0) for rule in bound}
        if any(rule.rate and calls[rule.id] >= rule.rate.calls for rule in bound) or any(
            rule.budget and is_spent(rule.budget, spent[rule.id], cost_pico) for rule in bound
        ):
            return CountOutcome(full=CallState(calls, spent))
        for rule in bound:
            if rule.rate is not None:
                self.counts[org_id, rule.id] = calls[rule.id] + 1
            if rule.budget is not None:
                self.spent[org_id, rule.id] = spent[rule.id] + cost_pico
        return CountOutcome()

    async def give_back(
        self, org_id: str, rules: Iterable[ToolRule], cost_pico: int, taken: CountOutcome
    ) -> None:
        for rule in rules:
            if rule.budget is not None:
                self.spent[org_id, rule.id] -= cost_pico

    async def tainted_by(self, caller: Caller) -> tuple[str, ...]:
        return tuple(self.tainted.get(caller.principal, ()))

    async def taint(self, caller: Caller, server: str) -> None:
        self.tainted.setdefault(caller.principal, []).append(server)

    async def once(self, org_id: str, key: str, ttl_s: float) -> bool:
        first = (org_id, key) not in self.seen
        self.seen.add((org_id, key))
        return first


class MemoryRecords:
    """Records in memory."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, str, int, bool]] = []
        self.denials: list[Denial] = []
        self.calls: list[CallRecord] = []
        self.reads: list[tuple[ReadRecord, Outcome]] = []
        self.ends: list[tuple[str, Outcome]] = []

    async def listed(
        self, caller: Caller, server: str, method: str, count: int, stale: bool
    ) -> None:
        self.lists.append((server, method, count, stale))

    async def denied(self, denial: Denial) -> None:
        self.denials.append(denial)

    async def read(self, read: ReadRecord, outcome: Outcome) -> None:
        self.reads.append((read, outcome))

    async def opened(self, call: CallRecord) -> None:
        self.calls.append(call)

    async def closed(self, call: CallRecord, outcome: Outcome) -> None:
        self.ends.append((call.id, outcome))


class FreeTicket(msgspec.Struct, frozen=True):
    cost_pico: int = 0

    async def begun(self) -> None:
        """Do nothing: there is nothing to keep."""

    async def ended(self, outcome: Outcome | None) -> bool:
        return False


class FreeMeter:
    """A Meter of calls that nobody pays for."""

    async def admit(self, call: CallRecord) -> Ticket:
        return FreeTicket()

    async def count(self, read: ReadRecord) -> None:
        """Do nothing: nobody's limits are asked."""


class MemoryPins:
    """A PinStore in memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], ApprovedPins] = {}

    async def approved(self, org_id: str, server: str) -> ApprovedPins:
        return self.kept.setdefault((org_id, server), ApprovedPins())

    def approve(self, org_id: str, server: str, changes: Iterable[Change]) -> None:
        before = self.kept.get((org_id, server), ApprovedPins())
        self.kept[org_id, server] = approve(before, changes)
