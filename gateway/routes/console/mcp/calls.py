"""Shows /console/mcp/calls, what was called and refused, and /console/mcp/taints, whose calls ask a
person first; lifts taints."""

from __future__ import annotations

import time

from litestar import Response

from gateway.console.hidden import visible
from gateway.console.tables import Table, TableColumn
from gateway.mcp.admin.call_log import KINDS, LoggedCall, read_calls
from gateway.mcp.calls import lift, lifting, taints_of
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ROWS, ConsoleRequest
from gateway.routes.console.mcp.names import find_names
from gateway.tenancy.errors import InvalidField, NotAllowed

calls = ConsolePage(name="mcp/calls", title="Calls", below="mcp", needs="admin:audit")
taints = ConsolePage(name="mcp/taints", title="Taints", below="mcp")
TONES = {"done": "ok", "asked": "wait", "failed": "err", "left": "plain", "refused": "err"}


@calls.get()
async def show_calls(request: ConsoleRequest) -> Response[bytes]:
    kind = request.value("kind", known=KINDS)
    async with request.transaction() as conn:
        found, more = await read_calls(
            conn,
            request.org_id,
            start=request.range.start,
            end=request.range.end,
            kinds=[each for each in KINDS if kind in ("", each)],
            server=request.value("server"),
            client_id=request.value("client"),
            before=sequence_of(request),
            limit=ROWS,
        )
        ids = [it for one in found for it in (one.client_id, one.subject_id, one.project_id)]
        named = await find_names(conn, request.org_id, ids)
    table = Table(
        "Calls",
        found,
        TableColumn("When", "occurred_at", kind="time"),
        TableColumn("What", "kind"),
        TableColumn("Server", lambda one: visible(one.server)),
        TableColumn("Tool or name", lambda one: visible(one.name)),
        TableColumn("Outcome", outcome_of, kind="tag"),
        TableColumn(
            "By",
            lambda one: named(one.client_id),
            link=lambda one: request.address(client=one.client_id),
        ),
        TableColumn("For", lambda one: named(one.subject_id)),
        TableColumn("Project", lambda one: named(one.project_id)),
        TableColumn("Rules", lambda one: visible(", ".join(map(str, one.about.get("rules", ()))))),
        TableColumn("Call", lambda one: one.about.get("call_id"), kind="id"),
    )
    service = request.services.mcp
    return request.render(
        "mcp/calls",
        table=table,
        more=str(found[-1].sequence) if more else None,
        kinds=KINDS,
        servers=[] if service is None else sorted(service.pins.of_org(request.org_id)),
    )


def outcome_of(call: LoggedCall) -> tuple[str, str]:
    if call.kind == "denied":
        return visible(call.outcome.replace("_", " ")) or "denied", "err"
    return call.outcome, TONES.get(call.outcome, "plain")


def sequence_of(request: ConsoleRequest) -> int | None:
    """Raises: InvalidField."""
    after = request.query.get("after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise InvalidField("after", "is the page of no list")
    return int(after) if after else None


@taints.get()
async def show_taints(request: ConsoleRequest) -> Response[bytes]:
    all_found = await taints_of(request.redis, org_id=request.org_id, now_s=time.time())
    first = sequence_of(request) or 0
    found = all_found[first : first + ROWS]
    async with request.transaction() as conn:
        callers = [each.caller for each in found]
        ids = [it for one in callers for it in (one.client, one.subject, one.project_id)]
        named = await find_names(conn, request.org_id, ids)
    table = Table(
        "Tainted callers",
        found,
        TableColumn("Key or client", lambda one: named(one.caller.client)),
        TableColumn("For", lambda one: named(one.caller.subject)),
        TableColumn("Project", lambda one: named(one.caller.project_id)),
        TableColumn("By what they heard of", lambda one: ", ".join(one.servers)),
        TableColumn("Until", "until_s", kind="time"),
        TableColumn("Id", lambda one: one.caller.client, kind="id"),
    )
    own = (request.user.key_id, request.user.client_id)
    last = first + ROWS
    more = str(last) if last < len(all_found) else None
    return request.render("mcp/taints", table=table, more=more, own=own)


@taints.post("/lift", needs="admin:mcp", again=show_taints)
async def lift_taint(request: ConsoleRequest) -> Response[bytes]:
    """Raises: NotFound, NotAllowed (of one's own)."""
    client = request.form.get("client_id", "")
    if client in (request.user.key_id, request.user.client_id):
        raise NotAllowed("client_id", "who is tainted cannot lift it")
    async with request.transaction() as conn:
        found = await lifting(
            conn, request.redis, org_id=request.org_id, client=client, actor=request.actor
        )
    await lift(request.redis, org_id=request.org_id, taints=found)
    return request.done("The taint is lifted: its calls ask nobody for that reason.")


routes = [*calls.routes, *taints.routes]
