"""Permits one call before it goes out, and settles it when it has ended or does not go out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from foundation.tasks import TaskSet
from mcp_bridge.caller import Caller
from mcp_bridge.errors import ApprovalRefused
from mcp_bridge.protocol.rpc import DENIED, RpcError
from mcp_bridge.routing.guard import GuardedRequest, Outcome, RequestPermit
from mcp_bridge.trust.approvals import Approval, Approvals, ApprovedCall, Decider, no_yes
from mcp_bridge.trust.call_records import (
    CallMemory,
    CallRecord,
    CountOutcome,
    Denial,
    Meter,
    Records,
    Rules,
    Ticket,
)
from mcp_bridge.trust.policy import CallState, Decision, ToolCall, ToolRule, decide, taint_matters

APPROVAL_TTL_S = 3600.0

Check = Callable[[CallRecord, dict[str, Any]], Awaitable[dict[str, Any]]]


OnFinding = Callable[[str, str], None]
"""Hears of what the guard stopped, beside what the records say is denied: a server, and what."""


def note_nowhere(_server: str, _finding: str) -> None:
    """Do nothing."""


class Ports(msgspec.Struct):
    """The services that a check uses. `endings`: tasks that end calls, which no client cancels."""

    records: Records
    memory: CallMemory
    meter: Meter
    approvals: Approvals
    endings: TaskSet
    on_finding: OnFinding = note_nowhere


class CallPermit(RequestPermit):
    """The permit of one call. Before the call goes out it is checked in this order: its caller's
    limits, the rules, a person's approval where they ask for one, what the rules count; then the
    approval is used, and the call is recorded. `check`: returns its checked result."""

    def __init__(
        self,
        ports: Ports,
        request: GuardedRequest,
        call: ToolCall,
        rules: Rules,
        record: CallRecord,
        check: Check,
        *,
        goes_on: bool,
    ) -> None:
        super().__init__()
        self._ports, self._request, self._goes_on = ports, request, goes_on
        self._check, self._is_closed = check, False
        self._call, self._rules, self.record = call, rules, record
        self._by: list[ToolRule] = []
        self._ticket: Ticket | None = None
        self._taken: CountOutcome | None = None

    async def admit(self) -> None:
        """Check the call, and count it. Raises: RpcError."""
        ports, call, rules = self._ports, self._call, self._rules.rules
        decision = decide(call, rules, CallState())
        if decision.effect == "deny":
            raise await self._denied(decision)
        looking = None
        if ports.memory.taints and taint_matters(call, decision):
            # While the limits are asked: both are trips to Redis.
            looking = asyncio.create_task(ports.memory.tainted_by(self.record.caller))
        try:
            if not self._goes_on:
                self._ticket = await self._admitted()
                call = msgspec.structs.replace(call, cost_pico=self._ticket.cost_pico)
            if looking is not None:
                decision = decide(self._call, rules, CallState(tainted_by=await looking))
        finally:
            if looking is not None:
                looking.cancel()
        said_yes = await self._said_yes(decision.decider) if decision.effect == "ask" else None
        self._by = [rule for rule in rules if rule.id in decision.rules]
        if not self._goes_on:
            taken = await self._take()
            if taken.full is not None:
                raise await self._denied(decide(call, rules, taken.full))
            self._taken = taken
        approval_id = None
        if said_yes is not None:  # last: what is refused here leaves it for another time
            approval_id = said_yes.id
            await self._spend(said_yes)
        elif decision.effect == "ask":
            approval_id = "continued"
        self.record = msgspec.structs.replace(
            self.record, rules=decision.rules, approval_id=approval_id
        )

    async def begin(self) -> None:
        """Record the call, before anything goes out. Raises: RpcError."""
        await self._ports.records.opened(self.record)
        if self._ticket is not None:
            await self._ticket.begun()

    async def give_back(self) -> None:
        """Give back what the call holds, before its client is told that it did not go out."""
        if self._ticket is not None:
            await asyncio.wait({self._ports.endings.spawn(self._settle(None))})

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the checked result, once the call is billed and recorded."""
        found = await self._check(self.record, result)
        self._is_closed = True
        await asyncio.shield(self._ports.endings.spawn(self._close("done")))
        return found

    async def failed(self) -> None:
        """Give back what the call holds: whoever is told that it failed may ask again at once."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.wait({self._ports.endings.spawn(self._close("failed"))})

    def ended(self, outcome: Outcome) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ports.endings.spawn(self._close(outcome))

    async def _close(self, outcome: Outcome) -> None:
        try:
            await self._settle(outcome)
        finally:
            await self._ports.records.closed(self.record, outcome)

    async def _settle(self, outcome: Outcome | None) -> None:
        if self._ticket is None:
            return
        paid = False
        try:
            paid = await self._ticket.ended(outcome)
        finally:
            if self._taken is not None and not paid:
                await self._untake(self._taken)

    async def _take(self) -> CountOutcome:
        """Count the call by the rules; a caller that leaves meanwhile has it given back."""
        if not any(rule.rate is not None or rule.budget is not None for rule in self._by):
            return CountOutcome()
        memory, cost_pico = self._ports.memory, self._cost_pico
        taking = asyncio.ensure_future(
            memory.take(self._call.org_id, self._by, self.record.id, cost_pico)
        )
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._ports.endings.spawn(self._untake_late(taking))
            raise

    async def _untake_late(self, taking: Awaitable[CountOutcome]) -> None:
        taken = await taking
        if taken.full is None:
            await self._untake(taken)

    async def _untake(self, taken: CountOutcome) -> None:
        memory = self._ports.memory
        await memory.give_back(self._call.org_id, self._by, self._cost_pico, taken)

    @property
    def _cost_pico(self) -> int:
        return 0 if self._ticket is None else self._ticket.cost_pico

    def _denial(self, reason: str) -> Denial:
        return denial_of(self.record.caller, self._request, self.record.tool, reason)

    async def _denied(self, decision: Decision) -> RpcError:
        denial = self._denial(decision.reason)
        return await record_denial(self._ports.records, denial, decision, self._request.alias)

    async def _admitted(self) -> Ticket:
        """Raises: RpcError."""
        try:
            return await self._ports.meter.admit(self.record)
        except RpcError as error:
            await record_limit(self._ports.records, self._denial(""), error)
            raise

    async def _said_yes(self, decider: Decider) -> Approval | None:
        """Return the unused approval of this call; None: it was used by the call that this one
        continues. Raises: RpcError."""
        record, approvals = self.record, self._ports.approvals
        if self._goes_on:
            return None
        if self._request.continues is not None:
            raise RpcError(DENIED, "This call has gone on already", {"reason": "replayed"})
        call = ApprovedCall(
            org_id=record.caller.org_id,
            caller=record.caller.principal,
            server=record.server,
            pin=record.pin,
            arguments_digest=record.arguments_digest,
            policy_version=self._rules.version,
            decider=decider,
        )
        try:
            found = await approvals.ask(
                call,
                ttl_s=APPROVAL_TTL_S,
                tool=record.tool,
                arguments=None if record.caller.keeps_nothing else self._call.arguments,
            )
        except ApprovalRefused as error:
            raise RpcError(DENIED, str(error), {"reason": "too_many_approvals"}) from None
        if found.state == "approved":
            return found
        self._ports.on_finding(record.server, "approval_required")
        raise no_yes(found, self._request.alias)

    async def _spend(self, found: Approval) -> None:
        """Raises: RpcError."""
        spent = await self._ports.approvals.use(
            found.id, found.call, nonce=found.nonce, call_id=self.record.id
        )
        if isinstance(spent, str):
            raise no_yes(found, self._request.alias)


def denial_of(caller: Caller, request: GuardedRequest, name: str, reason: str) -> Denial:
    server = request.upstream.name
    return Denial(caller=caller, server=server, name=name, reason=reason, method=request.method)


async def record_denial(
    records: Records, denial: Denial, decision: Decision, called: str
) -> RpcError:
    """Record that the rules refuse a request, and return the error for its client. `called`: the
    client's name for the tool, prompt or resource."""
    denial = msgspec.structs.replace(denial, reason=decision.reason, rules=decision.rules)
    await records.denied(denial)
    data: dict[str, Any] = {"reason": decision.reason, "rules": list(decision.rules)}
    if decision.retry_after_s is not None:
        data["retryAfterSeconds"] = decision.retry_after_s
    return RpcError(DENIED, f"Not allowed: {called}", data)


async def record_limit(records: Records, denial: Denial, error: RpcError) -> None:
    """Record that the caller's limits refuse a request."""
    data = error.data if isinstance(error.data, dict) else {}
    reason = str(data.get("reason", "not_accounted_for"))
    await records.denied(msgspec.structs.replace(denial, reason=reason))
