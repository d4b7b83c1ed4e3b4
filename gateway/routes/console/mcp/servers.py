"""Shows /console/mcp: the MCP servers of the organization with their health, what each offers and
what of it is approved; approves and revokes."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from litestar import Response

from gateway.console.hidden import visible
from gateway.console.tables import Table, TableColumn
from gateway.mcp.admin.decisions import count_waiting
from gateway.mcp.pins import find_pin, select_pins
from gateway.mcp.service.service import configured
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ROWS, ConsoleRequest
from gateway.routes.mcp.pins import cursor_of, show_page, to_server, to_summary
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from gateway.wire.admin.mcp_pins import McpChange, McpOfferQuery, McpServer
from mcp_bridge.pinning import Key, Pin
from mcp_bridge.trust.scan import scan

if TYPE_CHECKING:
    from mcp_bridge.upstream.upstream import ServerConfig

REVOCABLE = ("tool", "prompt", "instructions")
STATES = {
    "trusted": ("trusted", "plain"),
    "approved": ("approved", "ok"),
    "unapproved": ("nothing approved", "wait"),
}
HEALTH = {"closed": ("answers", "ok"), "resting": ("fails", "err"), "trying": ("fails", "err")}
CHANGED = {"new": "ok", "changed": "wait", "renamed": "wait", "removed": "err"}
SEVERITY = {"high": "err", "medium": "wait", "low": "plain"}
WORD = re.compile(r"\w+|\W")
MAX_DIFFED = 2_000
"""Characters of two texts, beyond which they are shown one after the other."""
CHOICE = "choice-"


async def badge(request: ConsoleRequest) -> int:
    """Return how many calls wait for a person."""
    async with request.transaction() as conn:
        return await count_waiting(conn, org_id=request.org_id)


page = ConsolePage(name="mcp", title="MCP", letter="m", badge=badge)


def path_of(server: str) -> str:
    return f"{page.path}/servers/{quote(server, safe='')}"


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    service = request.services.mcp
    found = [] if service is None else await service.pins.known(request.org_id)
    health = [] if service is None else service.health(request.org_id)
    configs = {each.config.name: each.config for each in found}
    table = Table(
        "MCP servers",
        sorted((to_server(each, health) for each in found), key=what_matters),
        TableColumn("Server", "name", link=lambda row: path_of(row.name)),
        TableColumn("Offer", lambda row: STATES[row.state], kind="tag"),
        TableColumn("Approved", "approved", kind="count"),
        TableColumn("Health", health_of, kind="tag", detail=failure_of),
        TableColumn("Last answer", answered_at, kind="time"),
        TableColumn("Kind", "transport"),
        TableColumn("Address", lambda row: visible(address_of(configs[row.name]))),
        TableColumn("Taints", lambda row: "yes" if configs[row.name].taints else None),
    )
    return request.render("mcp/servers", table=table)


def what_matters(server: McpServer) -> tuple[bool, bool, str]:
    """Sort those first that fail, and those last of which nothing is approved."""
    fails = server.health is not None and server.health.state != "closed"
    return not fails, server.state == "unapproved", server.name


def health_of(server: McpServer) -> tuple[str, str]:
    return ("not asked yet", "plain") if server.health is None else HEALTH[server.health.state]


def answered_at(server: McpServer) -> int | None:
    return None if server.health is None else server.health.last_answer_at


def failure_of(server: McpServer) -> str | None:
    found = server.health
    return found.last_failure if found is not None and found.state != "closed" else None


def address_of(config: ServerConfig) -> str:
    """Return where it is, without what may be a secret there."""
    return re.sub(r"(?<=://)[^/\s?#@]*@|\?[^\s#]*", "", config.address)


@page.get("/servers/{server:str}")
async def show_server(request: ConsoleRequest) -> Response[bytes]:
    config = named(request)
    kind, name = request.value("kind", known=REVOCABLE), request.value("name")
    listed = select_pins(request.org_id, config.name)
    keys = sa.tuple_(listed.selected_columns.kind, listed.selected_columns.name)
    if kind:
        listed = listed.where(listed.selected_columns.kind == kind)
    if name:
        listed = listed.where(listed.selected_columns.name.icontains(name, autoescape=True))
    if (after := request.query.get("after")) is not None:
        listed = listed.where(keys > sa.tuple_(*map(sa.literal, key_of(after))))
    async with request.transaction() as conn:
        rows = (await conn.execute(listed.order_by(keys).limit(ROWS + 1))).all()
    table = Table(
        "Approved",
        rows[:ROWS],
        TableColumn("Kind", lambda row: row.kind.replace("_", " ")),
        TableColumn(
            "Name",
            lambda row: visible(row.name) or title_of(row.kind),
            link=lambda row: f"{path_of(config.name)}/pin?key={quote(text_of(row.kind, row.name))}",
        ),
        TableColumn("Digest", "digest", kind="id"),
        TableColumn("Approved", "approved_at", kind="time"),
    )
    service = configured(request.services.mcp)
    found = [one for one in service.health(request.org_id) if one.upstream == config.name]
    return request.render(
        "mcp/server",
        table=table,
        more=text_of(rows[ROWS - 1].kind, rows[ROWS - 1].name) if len(rows) > ROWS else None,
        server=config,
        address=visible(address_of(config)),
        health=to_server(unasked(config), found).health,
        words=HEALTH,
        path=path_of(config.name),
        kinds=REVOCABLE,
        key_of=lambda row: text_of(row.kind, row.name),
    )


def unasked(config: ServerConfig) -> Any:
    """Return a server of which nothing is asked but its health."""
    from gateway.mcp.admin.pins_admin import ServerOffer

    return ServerOffer(config, 0)


@page.get("/servers/{server:str}/pin")
async def show_pin(request: ConsoleRequest) -> Response[bytes]:
    """Show one thing as it was approved, to the byte."""
    config, (kind, name) = named(request), key_of(request.query.get("key", ""))
    async with request.transaction() as conn:
        pin = await find_pin(conn, org_id=request.org_id, server=config.name, kind=kind, name=name)
    if pin is None:
        raise NotFound("key", "this is not approved, or is no more")
    findings = [] if kind == "launch" else await asyncio.to_thread(scan, pin.kind, pin.value())
    return request.render(
        "mcp/pin",
        server=config,
        path=path_of(config.name),
        pin=pin,
        key=text_of(kind, name),
        can_revoke=kind in REVOCABLE,
        title_of=title_of,
        definition=definition_of(pin),
        findings=findings,
        severity=SEVERITY,
    )


def definition_of(pin: Pin) -> str:
    return json.dumps(pin.value(), indent=2, ensure_ascii=False)


@page.get("/servers/{server:str}/offer", needs="admin:mcp")
async def show_offer(request: ConsoleRequest) -> Response[bytes]:
    """Ask the server, and show what it offers that is not approved."""
    config, pins = named(request), configured(request.services.mcp).pins
    after = request.query.get("after")
    seen = await pins.see(request.org_id, config.name, again=after is not None)
    shown = await show_page(pins, seen, McpOfferQuery(after=after, limit=ROWS))
    keys = {(each.kind, each.name): cursor_of(each) for each in seen.waits}
    return request.render(
        "mcp/offer",
        server=config,
        path=path_of(config.name),
        offer=shown,
        changes=[
            {
                "change": each,
                "choice": CHOICE + keys[each.kind, each.name],
                "lines": list(lines_of(each)),
                "worst": max((one.severity for one in each.findings), key=RANK.index, default=""),
            }
            for each in shown.changes
        ],
        tones=CHANGED,
        title_of=title_of,
        severity=SEVERITY,
        can_choose=REVOCABLE,
    )


RANK = ("low", "medium", "high")
Segment = tuple[str, str]
"""A tag, and a text: `ins`, `del`, `hit` (put in, and quoted by a finding) or nothing."""


def title_of(kind: str) -> str:
    """Return the name of a thing of which a server has one."""
    return {"launch": "how it is reached"}.get(kind, kind)


def lines_of(change: McpChange) -> Iterator[dict[str, Any]]:
    """Yield what differs, member by member, with what looks like an attack in it."""
    left = list(change.findings)
    for each in change.differences:
        found = [one for one in left if is_below(one.path, each.path)]
        left = [one for one in left if one not in found]
        segments = with_hits(segments_of(each.was, each.now), [one.detail for one in found])
        yield {"path": each.path, "segments": segments, "findings": found}
    if left:
        yield {"path": "", "segments": [], "findings": left}


def with_hits(segments: list[Segment], texts: Sequence[str]) -> list[Segment]:
    """Mark what findings quote in what was put in."""
    wanted = [re.escape(each) for each in texts if each]
    if not wanted:
        return segments
    quoted = re.compile(f"({'|'.join(wanted)})")
    return [
        ("hit" if at % 2 else tag, part) if tag == "ins" else (tag, part)
        for tag, text in segments
        for at, part in enumerate(quoted.split(text) if tag == "ins" else [text])
        if part
    ]


def is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def segments_of(was: str | None, now: str | None) -> list[Segment]:
    """Return a text word by word, with what was taken out and put in."""
    if was is None or now is None or len(was) + len(now) > MAX_DIFFED:
        both = (("del", was), ("ins", now))
        return [(tag, text) for tag, text in both if text is not None]
    old, new = WORD.findall(was), WORD.findall(now)
    found: list[Segment] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            found.append(("", "".join(old[a:b])))
            continue
        found += [("del", "".join(old[a:b]))] if a < b else []
        found += [("ins", "".join(new[c:d]))] if c < d else []
    return found


@page.post("/servers/{server:str}/approve", needs="admin:mcp", again=show_server)
async def approve(request: ConsoleRequest) -> Response[bytes]:
    """Approve what was chosen, or all that does not look like an attack, as it was shown."""
    config, pins = named(request), configured(request.services.mcp).pins
    seen = await pins.see(request.org_id, config.name, again=True)
    keys: Collection[Key] | None = None
    if "all" not in request.form:
        chosen = {name for name in request.form if name.startswith(CHOICE)}
        keys = [(each.kind, each.name) for each in seen.waits if CHOICE + cursor_of(each) in chosen]
        if not keys:
            raise InvalidField("tools", "choose what you approve")

    def check(found: Any) -> None:
        if to_summary(found).digest != request.form.get("digest"):
            raise Conflict("server", "it offers something else by now: look again, then approve")

    made = await pins.approve(request.org_id, config.name, keys, actor=request.actor, check=check)
    left = f" {len(made.waits)} wait." if made.waits else ""
    return request.done(
        f"Approved: every worker shows it within a second.{left}",
        to=f"{path_of(config.name)}/offer" if made.waits else path_of(config.name),
    )


@page.post("/servers/{server:str}/revoke", needs="admin:mcp", again=show_server)
async def revoke(request: ConsoleRequest) -> Response[bytes]:
    """Take back one approval, or all: then the server is not dialled any more."""
    config, pins = named(request), configured(request.services.mcp).pins
    keys = None if "all" in request.form else [key_of(request.form.get("key", ""))]
    await pins.revoke(request.org_id, config.name, keys, actor=request.actor)
    what = "All approvals are" if keys is None else f"{visible(keys[0][1]) or 'It'} is"
    return request.done(f"{what} taken back, in every worker.", to=path_of(config.name))


def named(request: ConsoleRequest) -> ServerConfig:
    """Raises: NotFound."""
    service = request.services.mcp
    if service is None:
        raise NotFound("server", "there are no MCP servers")
    return service.pins.named(request.org_id, request.ids["server"])


def text_of(kind: str, name: str) -> str:
    """Return the key of a pin as an address and a form carry it."""
    return msgspec.json.encode([kind, name]).decode()


def key_of(text: str) -> Key:
    """Raises: InvalidField."""
    try:
        found: Key = msgspec.json.decode(text, type=Key)
    except (msgspec.MsgspecError, UnicodeError):
        raise InvalidField("key", "names no thing that can be approved") from None
    return found


routes = page.routes
