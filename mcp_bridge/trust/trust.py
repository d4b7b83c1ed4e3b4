"""The guard of a bridge that trusts nobody by default: by pins, rules, approvals, checks.

A call goes out if its tool is offered exactly as it was approved, its arguments conform to the
pinned schema, the rules let it, a person has said yes where they ask for one, and it is on record.
Its result comes back if it conforms and is within bounds, marked with where it is from. A server of
`trust = "all"` needs no pins; everything else is the same.

What it remembers and where it is recorded is handed in (`call_records`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from foundation.tasks import TaskSet
from mcp_bridge.caller import Caller
from mcp_bridge.errors import NotCanonical, NotPinnable, SchemaRefused, ValidationTimedOut
from mcp_bridge.pinning import Pin, pin_of
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError
from mcp_bridge.provenance import Provenance, enveloped
from mcp_bridge.routing.catalog import KIND_OF, Catalog, ServerListing, VisibleList
from mcp_bridge.routing.guard import GuardedRequest, KnownResult, Outcome, RequestPermit
from mcp_bridge.trust.approvals import Approvals, arguments_digest
from mcp_bridge.trust.call_permit import CallAdmission, Ports, denial_of
from mcp_bridge.trust.call_records import (
    CallMemory,
    CallRecord,
    FreeMeter,
    Meter,
    Records,
    RuleSource,
)
from mcp_bridge.trust.read_permit import RequestSubject, permit_read, subject_of, to_call
from mcp_bridge.trust.visibility import Screen, digests_of, resources_shown, shows, view_of
from mcp_bridge.upstream.upstream import Unreachable, Upstream
from mcp_bridge.validation.arguments import (
    CompiledSchema,
    KillableEngine,
    Problem,
    SchemaCache,
    problems,
)
from mcp_bridge.validation.results import (
    ResultBounds,
    annotations_of,
    failed_result,
    result_problems,
)
from mcp_bridge.validation.sandboxed_validator import KillableValidator

log = logging.getLogger(__name__)
REPLAY_TTL_S = 900.0
"""Longer than a client's state is good for."""
URI_OF = {"resources/list": "uri", "resources/templates/list": "uriTemplate"}


class Trust:
    """The guard that checks pins, rules, approvals and schemas.

    `new_id`: ids of calls; `now_s`: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        rules: RuleSource,
        approvals: Approvals,
        memory: CallMemory,
        records: Records,
        new_id: Callable[[], str],
        meter: Meter | None = None,
        killable: KillableEngine | None = None,
        bounds: ResultBounds | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._catalog, self.rules = catalog, rules
        self.ports = Ports(
            records=records,
            memory=memory,
            meter=meter or FreeMeter(),
            approvals=approvals,
            endings=TaskSet(),
        )
        self.new_id, self.now_s = new_id, now_s
        self.killable = killable or KillableValidator()
        self.bounds = bounds or ResultBounds()
        self.schemas = SchemaCache()
        self._screen = Screen()

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    async def close(self) -> None:
        """Wait for the ends of calls, once nothing calls any more."""
        await self.ports.endings.wait()
        if isinstance(self.killable, KillableValidator):
            await self.killable.close()

    # What is shown.

    async def list_digests(
        self, caller: Caller, upstream: Upstream, seen: ServerListing
    ) -> Mapping[str, bytes]:
        rules = await self.rules.rules(caller.org_id)
        return await digests_of(seen.shown, caller=caller, server=upstream.name, rules=rules)

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

    async def offered(
        self, caller: Caller, upstream: Upstream, method: str, seen: ServerListing
    ) -> VisibleList:
        kind, server = KIND_OF[method], upstream.name
        rules = await self.rules.rules(caller.org_id)
        shown = await view_of(seen.shown[kind], kind, caller=caller, server=server, rules=rules)
        count = len(shown.pins)
        await self.ports.records.listed(caller, server, method, count, shown.stale)
        return shown

    async def screened(
        self, caller: Caller, upstream: Upstream, method: str, items: Iterable[Any]
    ) -> list[Any]:
        """Return the items without what looks like an attack: resources come and go, so nobody
        approves each."""
        shown = list(items)
        if upstream.config.trust != "all":
            shown = [item for item in shown if self._screen.is_harmless(item)]
        if member := URI_OF.get(method):
            rules = await self.rules.rules(caller.org_id)
            shown = await resources_shown(shown, member, caller, upstream.name, rules)
        await self.ports.records.listed(caller, upstream.name, method, len(shown), False)
        return shown

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        rules = await self.rules.rules(caller.org_id)
        return shows(rules.rules, caller, upstream.name, "resource", uri, {})

    async def heard(self, caller: Caller, upstream: Upstream) -> None:
        if upstream.config.taints:
            await self.ports.memory.taint(caller, upstream.name)

    # A call.

    async def before(self, caller: Caller, request: GuardedRequest) -> RequestPermit | None:
        about = subject_of(request)
        if about is None:
            return None
        if about.kind == "resource":
            return await self._before_read(caller, request, about)
        seen = request.seen
        assert seen is not None, "a request about a tool or a prompt comes with the listing"
        if seen.stale:
            raise Unreachable(request.upstream.name, "catalogue")
        pin = seen.pins.get((about.kind, about.name))
        if pin is None:
            await self.ports.records.denied(denial_of(caller, request, about.name, "not_approved"))
            raise RpcError(INVALID_PARAMS, f"Unknown {about.kind}: {request.alias}")
        if about.kind == "prompt":
            return await self._before_read(caller, request, about, pin=pin.digest)
        return await self._before_call(caller, request, pin)

    async def _before_read(
        self, caller: Caller, request: GuardedRequest, about: RequestSubject, *, pin: str = ""
    ) -> RequestPermit:
        rules = await self.rules.rules(caller.org_id)
        read_id = self.new_id()
        return await permit_read(
            self.ports, self.now_s, caller, request, about, rules, read_id=read_id, pin=pin
        )

    async def _before_call(
        self, caller: Caller, request: GuardedRequest, pin: Pin
    ) -> RequestPermit:
        tool = pin.value()
        assert isinstance(tool, dict)
        arguments = request.params.get("arguments")
        arguments = {} if arguments is None else arguments
        wrong = await self._wrong_arguments(pin, tool, arguments)
        denial = denial_of(caller, request, pin.name, "arguments")
        if wrong:
            await self.ports.records.denied(denial)
            return KnownResult(failed_result("The arguments do not conform to inputSchema.", wrong))
        try:
            digest = arguments_digest(arguments)
        except NotCanonical as error:
            problem = Problem(error.param, "type", error.message)
            await self.ports.records.denied(denial)
            return KnownResult(failed_result("The arguments cannot be written down.", (problem,)))
        rules = await self.rules.rules(caller.org_id)
        config = request.upstream.config
        # By its own name, however the client calls it.
        call = to_call(
            caller,
            config.name,
            "tool",
            pin.name,
            arguments=arguments,
            annotations=annotations_of(tool),
        )
        record = CallRecord(
            id=self.new_id(),
            caller=caller,
            server=config.name,
            tool=pin.name,
            alias=call.alias,
            pin=pin.digest,
            arguments_digest=digest,
            rules=(),
            continues=request.continues is not None,
        )
        goes_on = await self._goes_on(caller, request)
        permit = CallAdmission(self.ports, request, call, rules, record, goes_on=goes_on)
        try:
            await permit.ask()
            output = self._compiled(pin, tool, "outputSchema") if "outputSchema" in tool else None
            await permit.record_it()
        except BaseException:
            if permit.holds:
                self.ports.endings.spawn(permit.give_back())
            raise
        return CallPermit(self, request.upstream, permit, output)

    async def _goes_on(self, caller: Caller, request: GuardedRequest) -> bool:
        """It went out before, was permitted and counted then, and its client was asked something.
        Each of its states goes on once; shown again it is a call like all others."""
        if request.continues is None:
            return False
        state = hashlib.sha256(request.continues.encode()).hexdigest()
        return await self.ports.memory.once(caller.org_id, state, REPLAY_TTL_S)

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

    def _compiled(self, pin: Pin, tool: Mapping[str, Any], part: str) -> CompiledSchema:
        try:
            return self.schemas.compiled(pin.digest, part, tool.get(part, {"type": "object"}))
        except SchemaRefused as error:
            data = {"reason": "schema_refused", "part": part, "path": error.param}
            raise RpcError(INTERNAL_ERROR, "The tool's schema cannot be checked", data) from None

    async def checked(
        self, upstream: Upstream, record: CallRecord, output: CompiledSchema | None, result: Any
    ) -> dict[str, Any]:
        """Return a result as clients get it: within bounds, by its schema, marked.

        Never raises of what a server sent.
        """
        try:
            wrong = await result_problems(result, output, self.killable, self.bounds)
        except ValidationTimedOut:
            wrong = (Problem("", "schema", "takes too long to check"),)
        if wrong:
            log.info("mcp: %s: a result of %s is withheld", record.server, record.tool)
            return failed_result("The server's result is withheld: it does not conform.", wrong)
        origin = Provenance(
            server=record.server,
            tool=record.tool,
            pin=record.pin,
            call_id=record.id,
            received_at_s=self.now_s(),
            trusted=upstream.config.trust == "all",
        )
        return enveloped(result, origin)


class CallPermit:
    answered = None

    def __init__(
        self, trust: Trust, upstream: Upstream, permit: CallAdmission, output: CompiledSchema | None
    ) -> None:
        self._trust, self._upstream = trust, upstream
        self._permit, self._output = permit, output
        self._is_closed = False

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the checked result; what was done is on the bill and on record before it is
        told."""
        record = self._permit.record
        found = await self._trust.checked(self._upstream, record, self._output, result)
        self._is_closed = True
        await asyncio.shield(self._trust.ports.endings.spawn(self._permit.ended("done")))
        return found

    def ended(self, outcome: Outcome) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._trust.ports.endings.spawn(self._permit.ended(outcome))
