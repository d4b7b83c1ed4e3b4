"""Shows /console/audit: who changed what in the organization, and whether the log is as it was
recorded.

A verification reads the whole chain, so it is done when somebody asks. Where it stood is kept in
Redis, and the next one has to find that again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from litestar import Response

from gateway.audit.errors import UnknownAuditEntry
from gateway.audit.verify import NOWHERE, ChainPosition, verify_org
from gateway.console.tables import Table, TableColumn
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ROWS, ConsoleRequest
from gateway.tenancy.audit_pages import AuditEvent, get_entry, last_sequence, list_entries
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.wire.organization.audit import AuditLogsQuery

KEPT_IN = "tollgate:audit:verified:"
"""Begins the name under which an organization's last verification is kept."""
MAX_ENTRIES = 200_000
"""Longer logs are verified on the machine: a page has to answer."""
KINDS = {"api_key": "by a key", "client": "by an application"}
SYSTEM = {
    "cli": "the command line",
    "bootstrap": "the first start",
    "settings": "the settings file",
    "rotation": "the rotation of keys",
    "webhooks": "the sender of webhooks",
}

page = ConsolePage(name="audit", title="Audit log", letter="a", needs="admin:audit",
                   default_range="30d")  # fmt: skip


class LogVerification(msgspec.Struct, frozen=True, kw_only=True):
    """The last verification of a log, and the last entry that was found whole."""

    at: datetime
    sequence: int
    hash: str
    problem: str = ""
    """The fault, as a sentence; empty: there is none."""


async def read_verification(request: ConsoleRequest) -> LogVerification | None:
    kept = await request.redis.get(KEPT_IN + request.org_id)
    return None if kept is None else msgspec.json.decode(kept, type=LogVerification)


def who(event: AuditEvent) -> str:
    """Return the person, or else what acted."""
    for each in (event.actor_id, event.on_behalf_of):
        if each is not None and each in event.emails:
            return event.emails[each]
    if event.actor_kind == "system":
        return SYSTEM.get(event.actor_id, event.actor_id)
    if event.actor_id == event.org_id:
        return "a link, before anybody was signed in"
    if event.key_name is not None:
        return event.key_name
    return event.on_behalf_of or event.actor_id


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    action, person, target = (request.value(each) for each in ("action", "who", "target"))
    span = request.range
    query = AuditLogsQuery(
        after=request.cursor().after,
        limit=ROWS,
        event_types=[action] if action else [],
        actor_emails=[person] if "@" in person else [],
        actor_ids=[person] if person and "@" not in person else [],
        resource_ids=[target] if target else [],
        effective_from=max(int(span.start.timestamp()), 0),
        effective_until=int(span.end.timestamp()),
    )
    async with request.transaction() as conn:
        try:
            events, more = await list_entries(conn, request.org_id, query)
        except UnknownAuditEntry as error:
            raise NotFound("after", "no such entry") from error
    table = Table(
        "Audit log",
        events,
        TableColumn("When", "occurred_at", kind="moment"),
        TableColumn("Who", who, detail=lambda each: KINDS.get(each.actor_kind)),
        TableColumn("Action", "action", link=lambda each: f"{page.path}/{each.id}"),
        TableColumn("Target", "target", kind="id"),
        TableColumn("Project", "project_name"),
        TableColumn("From", "ip"),
        TableColumn("Request", "request_id", kind="id", in_page=False),
        TableColumn("Actor", "actor_id", kind="id", in_page=False),
    )  # fmt: skip
    return request.render(
        "audit",
        table=table,
        more=events[-1].id if more and events else None,
        verified=await read_verification(request),
    )


@page.get("/{entry_id:str}")
async def show_one(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        event = await get_entry(conn, request.org_id, request.ids["entry_id"])
    before, after = (_state(each) for each in (event.before, event.after))
    names = sorted(before.keys() | after.keys())
    changes = [
        {"name": each, "before": before.get(each), "after": after.get(each)} for each in names
    ]
    table = Table(
        "What changed",
        changes,
        TableColumn("Field", "name"),
        TableColumn("Before", lambda each: text_of(each["before"])),
        TableColumn("After", lambda each: text_of(each["after"])),
    )
    return request.render(
        "audit_entry", table=table, event=event, who=who(event), kind=KINDS.get(event.actor_kind)
    )


def _state(text: str | None) -> dict[str, Any]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])


def text_of(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


@page.post("/verify", needs="admin:audit", again=show)
async def verify(request: ConsoleRequest) -> Response[bytes]:
    """Read the whole chain, and keep what became of it."""
    known = await read_verification(request)
    witness = NOWHERE if known is None else ChainPosition(known.sequence, known.hash)
    async with request.transaction() as conn:
        if await last_sequence(conn, request.org_id) > MAX_ENTRIES:
            raise InvalidField(
                "log", f"is longer than {MAX_ENTRIES:,} entries: `tollgate audit verify` checks it"
            )
        verdict = await verify_org(conn, request.org_id, witness)
    finding = verdict.finding
    standing = verdict.standing if finding is None else witness
    problem = "" if finding is None else f"Entry {finding.sequence:,}: {finding.problem}."
    found = LogVerification(
        at=request.now, sequence=standing.sequence, hash=standing.hash, problem=problem
    )
    await request.redis.set(KEPT_IN + request.org_id, msgspec.json.encode(found))
    if problem:
        return request.done(f"The log is not as it was recorded. {problem}", tone="err")
    return request.done(f"The log is whole: each of {found.sequence:,} entries is as recorded.")


routes = page.routes
