"""Decides whether a caller may read a resource or be told of it, get a prompt or a completion.

Rules match a prompt as `server__prompt`, a resource as `server__` and its URI, and a completion as
what it completes; all of them only read, and their arguments are the prompt's, or the URI. Nobody
is asked about them: a rule that asks refuses. They count for their caller's limits and the rates of
rules, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.errors import NotCanonical
from mcp_bridge.names import SEPARATOR, alias_of
from mcp_bridge.pinning import Kind
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, RpcError
from mcp_bridge.provenance import Provenance, enveloped
from mcp_bridge.routing.guard import GuardedRequest, Outcome, RequestPermit
from mcp_bridge.trust.call_permit import Ports, record_denial, record_limit
from mcp_bridge.trust.call_records import Denial, ReadRecord, Rules
from mcp_bridge.trust.policy import CallState, ToolCall, decide
from mcp_bridge.upstream.upstream import as_object
from mcp_bridge.validation.arguments import beside
from mcp_bridge.validation.message_shapes import result_problem

READS_ONLY: Mapping[str, object] = {
    "readOnlyHint": True,
    "destructiveHint": False,
    "idempotentHint": True,
}


class RequestSubject(msgspec.Struct, frozen=True):
    """The subject of a request. `name`: a tool's or a prompt's at its server, or a URI."""

    kind: Kind
    name: str
    arguments: Mapping[str, object] = {}


def subject_of(request: GuardedRequest) -> RequestSubject | None:
    params = request.params
    match request.method:
        case "tools/call":
            return RequestSubject("tool", str(params.get("name")))
        case "prompts/get":
            return RequestSubject(
                "prompt", str(params.get("name")), as_object(params.get("arguments"))
            )
        case "resources/read" | "resources/subscribe" | "subscriptions/listen":
            uri = str(params.get("uri"))
            return RequestSubject("resource", uri, {"uri": uri})
        case "completion/complete":
            of, given = as_object(params.get("ref")), as_object(params.get("argument"))
            arguments = {str(given.get("name")): given.get("value")}
            if of.get("type") == "ref/prompt":
                return RequestSubject("prompt", str(of.get("name")), arguments)
            return RequestSubject("resource", str(of.get("uri")), arguments)
    return None


def ruled_as(server: str, kind: Kind, name: str) -> str:
    """Return the text that the globs of rules are matched with."""
    if kind in ("tool", "prompt"):
        return alias_of(server, name)
    return f"{server}{SEPARATOR}{name}"


def to_call(
    caller: Caller,
    server: str,
    kind: Kind,
    name: str,
    *,
    arguments: Mapping[str, object],
    annotations: Mapping[str, object] = READS_ONLY,
) -> ToolCall:
    """Return the request as policy sees it."""
    return ToolCall(
        org_id=caller.org_id,
        project_id=caller.project_id,
        key_id=caller.client,
        server=server,
        tool=name,
        alias=ruled_as(server, kind, name),
        arguments=arguments,
        annotations=annotations,
    )


async def permit_read(
    ports: Ports,
    now_s: Callable[[], float],
    caller: Caller,
    request: GuardedRequest,
    about: RequestSubject,
    rules: Rules,
    *,
    read_id: str,
    pin: str = "",
) -> ReadPermit:
    """Check a read by the rules and the caller's limits, and count it. `pin`: of a prompt, its
    digest as it was approved. Raises: RpcError."""
    server, name = request.upstream.name, about.name
    call = to_call(caller, server, about.kind, name, arguments=about.arguments)
    denial = Denial(caller=caller, server=server, name=name, reason="", method=request.method)
    said = request.alias if request.method == "prompts/get" else name
    decision = decide(call, rules.rules, CallState())
    if decision.effect != "allow":
        raise await record_denial(ports.records, denial, decision, said)
    record = ReadRecord(
        id=read_id,
        caller=caller,
        server=server,
        method=request.method,
        name=name,
        rules=decision.rules,
        offer_age_s=request.offer_age_s,
    )
    try:
        await ports.meter.count(record)
    except RpcError as error:
        await record_limit(ports.records, denial, error)
        raise
    by = [rule for rule in rules.rules if rule.id in decision.rules]
    taken = await ports.memory.take(caller.org_id, by, record.id, 0)
    if taken.full is not None:
        raise await record_denial(
            ports.records, denial, decide(call, rules.rules, taken.full), said
        )
    origin = Provenance(
        server=server,
        prompt=name if about.kind == "prompt" else "",
        resource=name if about.kind == "resource" else "",
        pin=pin,
        call_id=record.id,
        received_at_s=0.0,
        trusted=request.upstream.config.trust == "all",
    )
    return ReadPermit(ports, now_s, record, origin, request.is_modern)


class ReadPermit(RequestPermit):
    """The permit of a read."""

    def __init__(
        self,
        ports: Ports,
        now_s: Callable[[], float],
        record: ReadRecord,
        origin: Provenance,
        is_modern: bool,
    ) -> None:
        super().__init__()
        self._is_modern = is_modern
        self._ports, self._now_s = ports, now_s
        self._record, self._origin = record, origin

    async def result(self, result: dict[str, Any]) -> dict[str, Any]:
        origin = msgspec.structs.replace(self._origin, received_at_s=self._now_s())
        wrong = await beside(
            result, result_problem, self._record.method, result, modern=self._is_modern
        )
        if wrong is not None:
            text = f"The server's result is withheld: {wrong.path or '(root)'}: {wrong.message}"
            raise RpcError(INTERNAL_ERROR, text, {"reason": "result_refused", "path": wrong.path})
        try:
            return await beside(result, enveloped, result, origin)
        except NotCanonical:
            raise RpcError(INTERNAL_ERROR, "The server's answer nests too deeply") from None

    def ended(self, outcome: Outcome) -> None:
        self._ports.endings.spawn(self._ports.records.read(self._record, outcome))
