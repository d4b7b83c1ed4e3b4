"""The guard of a bridge that trusts nobody by default: pins, rules, approvals, checks.

Above: who wires the bridge. Below: `catalog`, `policy`, `approvals`, `validation`, `results`,
`provenance`. A call goes out if its tool is offered exactly as it was approved, its arguments
conform to the pinned schema, the rules let it, a person has said yes where they ask for one, and it
is on record. Its result comes back if it conforms and is within bounds, marked with where it is
from. A server of `trust = "all"` needs no pins; everything else is the same.

What it remembers and where it is recorded is handed in (`call_records`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from mcp_bridge.approvals import Approvals, ApprovedCall, arguments_digest
from mcp_bridge.call_records import CallMemory, CallRecord, Denial, Records, Rules, RuleSource
from mcp_bridge.caller import Caller
from mcp_bridge.catalog import Catalog
from mcp_bridge.errors import (
    ApprovalRefused,
    NotCanonical,
    NotPinnable,
    SchemaRefused,
    ValidationTimedOut,
)
from mcp_bridge.guard import KIND_OF, Asking, Outcome, Passage, Shown, Source
from mcp_bridge.killable import KillableValidator
from mcp_bridge.pinning import Pin, pin_of
from mcp_bridge.policy import (
    CallState,
    Decision,
    ToolCall,
    decide,
)
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError
from mcp_bridge.provenance import Provenance, enveloped
from mcp_bridge.results import ResultBounds, result_problems
from mcp_bridge.scan import scan, worst
from mcp_bridge.upstream import Unreachable, Upstream
from mcp_bridge.validation import Compiled, KillableEngine, Problem, SchemaCache, problems

log = logging.getLogger(__name__)

DENIED = -32030
APPROVAL_NEEDED = -32031
"""Ours, of the range that JSON-RPC leaves to servers."""
APPROVAL_TTL_S = 3600.0
REPLAY_TTL_S = 900.0
"""Longer than a client's state is good for."""
MAX_SCREENED = 4_096


class Trust:
    """A Guard. `new_id`: ids of calls; `now_s`: seconds since the epoch."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        rules: RuleSource,
        approvals: Approvals,
        memory: CallMemory,
        records: Records,
        new_id: Callable[[], str],
        killable: KillableEngine | None = None,
        bounds: ResultBounds | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.catalog, self.rules, self.approvals = catalog, rules, approvals
        self.memory, self.records = memory, records
        self.new_id, self.now_s = new_id, now_s
        self.killable = killable or KillableValidator()
        self.bounds = bounds or ResultBounds()
        self.schemas = SchemaCache()
        self._screened: dict[bytes, bool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Once nothing calls any more."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        if isinstance(self.killable, KillableValidator):
            await self.killable.close()

    # What is shown.

    async def opens(self, caller: Caller, upstream: Upstream) -> bool:
        return await self.catalog.opens(caller.org_id, upstream.config)

    async def instructions(
        self, caller: Caller, upstream: Upstream, said: str | None
    ) -> str | None:
        if said is None:
            return None
        try:
            pin = pin_of("instructions", said)
        except (NotCanonical, NotPinnable):
            return None
        admitted = await self.catalog.admits(caller.org_id, upstream.config, pin)
        return said if admitted else None

    async def offered(self, source: Source, upstream: Upstream, method: str) -> Shown | None:
        kind = KIND_OF.get(method)
        if kind is None:
            return None
        if not await self.opens(source.caller, upstream):
            return Shown((), stale=False)
        seen = await self.catalog.current(source, upstream)
        items = seen.shown.get(kind, ())
        await self.records.listed(source.caller, upstream.name, method, len(items), seen.stale)
        return Shown(items, seen.stale)

    def screened(self, upstream: Upstream, method: str, items: Iterable[Any]) -> list[Any]:
        """Without what looks like an attack: resources come and go, so nobody approves each."""
        if upstream.config.trust == "all":
            return list(items)
        return [item for item in items if self._is_harmless(item)]

    def _is_harmless(self, item: Any) -> bool:
        key = hashlib.sha256(msgspec.json.encode(item)).digest()
        found = self._screened.get(key)
        if found is None:
            if len(self._screened) >= MAX_SCREENED:
                self._screened.clear()
            found = self._screened[key] = worst(scan("resource", item)) != "high"
        return found

    # A call.

    async def before(self, source: Source, asking: Asking) -> Passage | None:
        kind = KIND_OF.get(asking.method)
        if kind is None:
            return None
        caller, server = source.caller, asking.upstream.name
        seen = await self.catalog.current(source, asking.upstream)
        if seen.stale:
            raise Unreachable(server, "catalogue")
        name = str(asking.params.get("name"))
        pin = seen.pins.get((kind, name))
        if pin is None:
            denial = Denial(caller=caller, server=server, name=name, reason="not_approved")
            await self.records.denied(denial)
            raise RpcError(INVALID_PARAMS, f"Unknown {kind}: {asking.alias}")
        return await self._before_call(caller, asking, pin) if kind == "tool" else None

    async def _before_call(self, caller: Caller, asking: Asking, pin: Pin) -> Passage:
        tool = pin.value()
        assert isinstance(tool, dict)
        arguments = asking.params.get("arguments")
        arguments = {} if arguments is None else arguments
        wrong = await self._wrong_arguments(pin, tool, arguments)
        if wrong:
            return Answered(failed_result("The arguments do not conform to inputSchema.", wrong))
        try:
            digest = arguments_digest(arguments)
        except NotCanonical as error:
            problem = Problem(error.path, "type", error.message)
            return Answered(failed_result("The arguments cannot be written down.", (problem,)))
        rules = await self.rules.rules(caller.org_id)
        config = asking.upstream.config
        call = ToolCall(
            org_id=caller.org_id,
            project_id=caller.project_id,
            key_id=caller.client,
            server=config.name,
            tool=pin.name,
            alias=asking.alias,
            arguments=arguments,
            annotations=annotations_of(tool),
            trusted=config.trust == "all",
        )
        record = CallRecord(
            id=self.new_id(),
            caller=caller,
            server=config.name,
            tool=pin.name,
            alias=asking.alias,
            pin=pin.digest,
            arguments_digest=digest,
            rules=(),
            continues=asking.continues is not None,
        )
        tainted = await self.memory.tainted_by(caller)
        decision = decide(call, rules.rules, CallState(tainted_by=tainted))
        record = await self._permitted(asking, call, rules, decision, record)
        output = self._compiled(pin, tool, "outputSchema") if "outputSchema" in tool else None
        await self.records.opened(record)
        return CallPassage(self, asking.upstream, record, output)

    async def _wrong_arguments(
        self, pin: Pin, tool: Mapping[str, Any], arguments: object
    ) -> tuple[Problem, ...]:
        if not isinstance(arguments, dict):
            return (Problem("", "type", "is no object"),)
        compiled = self._compiled(pin, tool, "inputSchema")
        try:
            return await problems(compiled, arguments, self.killable)
        except ValidationTimedOut as error:
            raise RpcError(INVALID_PARAMS, "The arguments take too long to check") from error

    def _compiled(self, pin: Pin, tool: Mapping[str, Any], part: str) -> Compiled:
        try:
            return self.schemas.compiled(pin.digest, part, tool.get(part, {"type": "object"}))
        except SchemaRefused as error:
            data = {"reason": "schema_refused", "part": part, "path": error.path}
            raise RpcError(INTERNAL_ERROR, "The tool's schema cannot be checked", data) from None

    async def _permitted(
        self, asking: Asking, call: ToolCall, rules: Rules, decision: Decision, record: CallRecord
    ) -> CallRecord:
        """The record with what let it pass. Raises: RpcError."""
        if decision.effect == "deny":
            raise await self._denied(record, decision)
        approval: str | None = None
        if decision.effect == "ask":
            approval = await self._approved(asking, rules, record)
        if asking.continues is None:
            by = [rule for rule in rules.rules if rule.id in decision.rules]
            full = await self.memory.take(call.org_id, by, record.id)
            if full is not None:
                again = decide(call, rules.rules, CallState(calls=full))
                raise await self._denied(record, again)
        return msgspec.structs.replace(record, rules=decision.rules, approval_id=approval)

    async def _denied(self, record: CallRecord, decision: Decision) -> RpcError:
        denial = Denial(
            caller=record.caller,
            server=record.server,
            name=record.tool,
            reason=decision.reason,
            rules=decision.rules,
        )
        await self.records.denied(denial)
        data: dict[str, Any] = {"reason": decision.reason, "rules": list(decision.rules)}
        if decision.retry_after_s is not None:
            data["retryAfterSeconds"] = decision.retry_after_s
        return RpcError(DENIED, f"Not allowed: {record.alias}", data)

    async def _approved(self, asking: Asking, rules: Rules, record: CallRecord) -> str:
        """The id of what was approved for this call, and is spent on it. Raises: RpcError."""
        caller = record.caller
        if asking.continues is not None:
            # Its approval was spent when it went out; each of its states goes on once.
            state = hashlib.sha256(asking.continues.encode()).hexdigest()
            if await self.memory.once(caller.org_id, state, REPLAY_TTL_S):
                return "continued"
            raise RpcError(DENIED, "This call has gone on already", {"reason": "replayed"})
        call = ApprovedCall(
            org_id=caller.org_id,
            caller=caller.principal,
            server=record.server,
            pin=record.pin,
            arguments_digest=record.arguments_digest,
            policy_version=rules.version,
        )
        try:
            found = await self.approvals.ask(call, ttl_s=APPROVAL_TTL_S)
            if found.state == "approved":
                spent = await self.approvals.use(
                    found.id, call, nonce=found.nonce, call_id=record.id
                )
                if not isinstance(spent, str):
                    return spent.id
        except ApprovalRefused as error:
            raise RpcError(DENIED, str(error), {"reason": "too_many_approvals"}) from None
        data = {
            "reason": "approval_required",
            "approvalId": found.id,
            "expiresAt": int(found.expires_at_s),
        }
        raise RpcError(APPROVAL_NEEDED, f"{record.alias} waits for a person's approval", data)

    async def checked(
        self, upstream: Upstream, record: CallRecord, output: Compiled | None, result: Any
    ) -> dict[str, Any]:
        """A result as clients get it: within bounds, by its schema, marked. Never raises of what a
        server sent."""
        try:
            wrong = await result_problems(result, output, self.killable, self.bounds)
        except ValidationTimedOut:
            wrong = (Problem("", "schema", "takes too long to check"),)
        if wrong:
            log.info("mcp: %s: a result of %s is withheld", record.server, record.tool)
            return failed_result("The server's result is withheld: it does not conform.", wrong)
        if upstream.config.taints:
            await self.memory.taint(record.caller, record.server)
        origin = Provenance(
            server=record.server,
            tool=record.tool,
            pin=record.pin,
            call_id=record.id,
            received_at_s=self.now_s(),
            trusted=upstream.config.trust == "all",
        )
        return enveloped(result, origin)

    def close_soon(self, record: CallRecord, outcome: Outcome) -> None:
        """Outside of what was cancelled."""
        task = asyncio.get_running_loop().create_task(self.records.closed(record, outcome))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class Answered(msgspec.Struct, frozen=True):
    """A Passage of a call that does not go out: its result is known."""

    answered: dict[str, Any]

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing went out")

    def ended(self, outcome: Outcome) -> None:
        """Nothing began."""


class CallPassage:
    answered = None

    def __init__(
        self, trust: Trust, upstream: Upstream, record: CallRecord, output: Compiled | None
    ) -> None:
        self._trust, self._upstream = trust, upstream
        self._record, self._output = record, output
        self._is_closed = False

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """What was done is on record before it is told."""
        found = await self._trust.checked(self._upstream, self._record, self._output, result)
        self._is_closed = True
        await self._trust.records.closed(self._record, "done")
        return found

    def ended(self, outcome: Outcome) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._trust.close_soon(self._record, outcome)


def annotations_of(tool: Mapping[str, Any]) -> Mapping[str, object]:
    found = tool.get("annotations")
    return found if isinstance(found, dict) else {}


def failed_result(message: str, wrong: Iterable[Problem]) -> dict[str, Any]:
    """A tool's error, which the model may read and do better."""
    lines = [message, *(f"{one.path or '(root)'}: {one.message}" for one in wrong)]
    return {"content": [{"type": "text", "text": "\n".join(lines)}], "isError": True}
