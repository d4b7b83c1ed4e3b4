"""The guard that trusts no server by default: it checks pins, rules, approvals and schemas.

A call goes out if its tool is offered exactly as it was approved, its arguments conform to the
pinned schema, the rules allow it, a person has approved it where they ask for that, and it is
recorded. Its result comes back if it conforms and is within bounds, marked with its origin. A
server of `trust = "all"` needs no pins; everything else is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from foundation.tasks import TaskSet
from mcp_bridge.caller import Caller
from mcp_bridge.errors import NotCanonical, NotPinnable, SchemaRefused, ValidationTimedOut
from mcp_bridge.pinning import Kind, Pin, pin_of
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError
from mcp_bridge.provenance import Provenance, enveloped
from mcp_bridge.routing.catalog import KIND_OF, Catalog, ServerListing, VisibleList
from mcp_bridge.routing.guard import Guard, GuardedRequest, RequestPermit
from mcp_bridge.trust.approvals import Approvals, arguments_digest
from mcp_bridge.trust.call_permit import CallPermit, OnFinding, Ports, denial_of, note_nowhere
from mcp_bridge.trust.call_records import (
    CallMemory,
    CallRecord,
    Denial,
    Meter,
    Records,
    RuleSource,
)
from mcp_bridge.trust.read_permit import RequestSubject, permit_read, subject_of, to_call
from mcp_bridge.trust.visibility import Screen, Viewer
from mcp_bridge.upstream.upstream import Unreachable, Upstream
from mcp_bridge.validation.arguments import (
    CompiledSchema,
    KillableEngine,
    Problem,
    SchemaCache,
    beside,
    problems,
)
from mcp_bridge.validation.message_shapes import is_definition
from mcp_bridge.validation.results import (
    ResultBounds,
    annotations_of,
    failed_result,
    result_problems,
)
from mcp_bridge.validation.sandboxed_validator import ValidatorPool

log = logging.getLogger(__name__)
REPLAY_TTL_S = 900.0
"""Longer than a client's state is valid."""
URI_OF = {"resources/list": "uri", "resources/templates/list": "uriTemplate"}
LISTED_KINDS: Mapping[str, Kind] = {
    "resources/list": "resource",
    "resources/templates/list": "resource_template",
}


class Trust(Guard):
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
        meter: Meter,
        killable: KillableEngine | None = None,
        bounds: ResultBounds | None = None,
        on_finding: OnFinding = note_nowhere,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.catalog: Catalog = catalog
        self.rules = rules
        self.ports = Ports(
            records, memory, meter, approvals, endings=TaskSet(), on_finding=on_finding
        )
        self.new_id, self.now_s = new_id, now_s
        self.killable = killable or ValidatorPool()
        self.bounds = bounds or ResultBounds()
        self.schemas = SchemaCache()
        self._screen = Screen()

    async def close(self) -> None:
        """Wait for the ends of calls, once nothing calls any more."""
        await self.ports.endings.wait()
        if isinstance(self.killable, ValidatorPool):
            await self.killable.close()

    # Lists and messages.

    async def _viewer(self, caller: Caller, upstream: Upstream) -> Viewer:
        return Viewer(caller, upstream.name, await self.rules.rules(caller.org_id))

    async def list_digests(
        self, caller: Caller, upstream: Upstream, seen: ServerListing
    ) -> Mapping[str, bytes]:
        return await (await self._viewer(caller, upstream)).digests_of(seen.shown)

    async def may_dial(self, caller: Caller, upstream: Upstream) -> bool:
        return await self.catalog.opens(caller.org_id, upstream.config)

    async def shown_instructions(
        self, caller: Caller, upstream: Upstream, instructions: str | None
    ) -> str | None:
        if instructions is None:
            return None
        try:
            pin = pin_of("instructions", instructions)
        except (NotCanonical, NotPinnable):
            return None
        admitted = await self.catalog.admits(caller.org_id, upstream.config, pin)
        return instructions if admitted else None

    async def shown_list(
        self, caller: Caller, upstream: Upstream, method: str, seen: ServerListing
    ) -> VisibleList:
        kind = KIND_OF[method]
        shown = await (await self._viewer(caller, upstream)).view_of(seen.shown[kind], kind)
        count = len(shown.pins)
        await self.ports.records.listed(caller, upstream.name, method, count, shown.stale)
        return shown

    async def shown_items(
        self, caller: Caller, upstream: Upstream, method: str, items: list[Any]
    ) -> list[Any]:
        """Return the items that are definitions as the protocol has them, and that the scanner does
        not flag: resources come and go, so nobody approves each."""
        kind = LISTED_KINDS.get(method)
        if kind is not None:
            items = [item for item in items if is_definition(kind, item)]
        if upstream.config.trust != "all":
            # A millisecond each, of thousands.
            listed, items = items, await asyncio.to_thread(self._screen.harmless, items)
            for _ in range(len(listed) - len(items)):
                self.ports.on_finding(upstream.name, "resource_hidden")
        if member := URI_OF.get(method):
            items = await (await self._viewer(caller, upstream)).shown_resources(items, member)
        await self.ports.records.listed(caller, upstream.name, method, len(items), False)
        return items

    async def shows_resource(self, caller: Caller, upstream: Upstream, uri: str) -> bool:
        return (await self._viewer(caller, upstream)).shows("resource", uri)

    async def note_message(self, caller: Caller, upstream: Upstream) -> None:
        if upstream.config.taints:
            await self.ports.memory.taint(caller, upstream.name)

    async def note_declined(
        self, caller: Caller, upstream: Upstream, method: str, name: str, reason: str
    ) -> None:
        denial = Denial(
            caller=caller, server=upstream.name, name=name, reason=reason, method=method
        )
        await self.ports.records.denied(denial)

    # A call.

    async def permit(self, caller: Caller, request: GuardedRequest) -> RequestPermit:
        about = subject_of(request)
        if about is None:
            return RequestPermit()
        if about.kind == "resource":
            return await self._before_read(caller, request, about)
        seen = request.seen
        assert seen is not None, "a request about a tool or a prompt comes with the listing"
        if seen.stale:
            raise Unreachable(request.upstream.name, "catalogue")
        pin = seen.pins.get((about.kind, about.name))
        if pin is None:
            return await self._not_offered(caller, request, about)
        if about.kind == "prompt":
            return await self._before_read(caller, request, about, pin=pin.digest)
        return await self._before_call(caller, request, pin)

    async def _not_offered(
        self, caller: Caller, request: GuardedRequest, about: RequestSubject
    ) -> RequestPermit:
        """Return a tool error that says what is wrong with the tool's definition. Raises: RpcError,
        for what is not approved, and a prompt."""
        assert request.seen is not None
        refused = request.seen.refused.get((about.kind, about.name))
        reason = "not_approved" if refused is None else "definition_refused"
        await self.ports.records.denied(denial_of(caller, request, about.name, reason))
        if refused is None:
            raise RpcError(INVALID_PARAMS, f"Unknown {about.kind}: {request.alias}")
        text = f"The server's definition of this {about.kind} is refused."
        if about.kind == "tool":
            return RequestPermit(
                failed_result(text, (Problem(refused.path, "definition", refused.reason),))
            )
        raise RpcError(INVALID_PARAMS, f"{text} {refused.path}: {refused.reason}")

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
            text = "The arguments do not conform to inputSchema."
            return RequestPermit(failed_result(text, wrong))
        try:
            digest = await beside(arguments, arguments_digest, arguments)
        except NotCanonical as error:
            problem = Problem(error.param, "type", error.message)
            await self.ports.records.denied(denial)
            return RequestPermit(failed_result("The arguments cannot be written down.", (problem,)))
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
            offer_age_s=request.offer_age_s,
        )
        goes_on = await self._goes_on(caller, request)
        check = partial(self.checked, request, pin, tool)
        permit = CallPermit(self.ports, request, call, rules, record, check, goes_on=goes_on)
        try:
            await permit.admit()
            await self._output_schema(
                pin, tool
            )  # a call is refused whose result could not be checked
            await permit.begin()
        except BaseException:
            await permit.give_back()
            raise
        return permit

    async def _goes_on(self, caller: Caller, request: GuardedRequest) -> bool:
        """True if the call went out before, was permitted and counted then, and its client was
        asked something. Each state continues once; shown again it is a call like all others."""
        if request.continues is None:
            return False
        state = hashlib.sha256(request.continues.encode()).hexdigest()
        return await self.ports.memory.once(caller.org_id, state, REPLAY_TTL_S)

    async def _wrong_arguments(
        self, pin: Pin, tool: Mapping[str, Any], arguments: object
    ) -> tuple[Problem, ...]:
        if not isinstance(arguments, dict):
            return (Problem("", "type", "is no object"),)
        compiled = await self._compiled(pin, tool, "inputSchema")
        try:
            return await problems(compiled, arguments, self.killable)
        except ValidationTimedOut as error:
            raise RpcError(INVALID_PARAMS, "The arguments take too long to check") from error

    async def _compiled(self, pin: Pin, tool: Mapping[str, Any], part: str) -> CompiledSchema:
        schema = tool.get(part, {"type": "object"})
        try:
            return await self.schemas.compiled(pin.digest, part, schema)
        except SchemaRefused as error:
            data = {"reason": "schema_refused", "part": part, "path": error.param}
            raise RpcError(INTERNAL_ERROR, "The tool's schema cannot be checked", data) from None

    async def _output_schema(self, pin: Pin, tool: Mapping[str, Any]) -> CompiledSchema | None:
        return await self._compiled(pin, tool, "outputSchema") if "outputSchema" in tool else None

    async def checked(
        self,
        request: GuardedRequest,
        pin: Pin,
        tool: Mapping[str, Any],
        record: CallRecord,
        result: dict[str, Any],
    ) -> dict[str, Any]:
        """Return a result as clients get it: within bounds, by its schema, marked.

        Never raises because of what a server sent.
        """
        output = await self._output_schema(pin, tool)
        try:
            wrong = await result_problems(
                result, output, self.killable, self.bounds, modern=request.is_modern
            )
        except ValidationTimedOut:
            wrong = (Problem("", "schema", "takes too long to check"),)
        if wrong:
            log.info("mcp: %s: a result of %s is withheld", record.server, record.tool)
            self.ports.on_finding(record.server, "result_withheld")
            return failed_result("The server's result is withheld: it does not conform.", wrong)
        origin = Provenance(
            server=record.server,
            tool=record.tool,
            pin=record.pin,
            call_id=record.id,
            received_at_s=self.now_s(),
            trusted=request.upstream.config.trust == "all",
        )
        return await beside(result, enveloped, result, origin)
