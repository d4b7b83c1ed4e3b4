"""Shows /console/mcp/rules: the rules for calls of tools, and what they say of one that is tried;
adds, replaces and removes rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Response

from billing.errors import MoneyError
from billing.money import format_usd, usd
from billing.queries import ask, ask_all
from gateway.console.hidden import visible
from gateway.console.tables import Table, TableColumn
from gateway.mcp.admin.rule_trials import (
    Trial,
    TrialChoice,
    annotations_query,
    choices_query,
    try_call,
)
from gateway.mcp.admin.rule_warnings import warnings_of
from gateway.mcp.known import announce
from gateway.mcp.rules import read_rules, replace_rules
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ROWS, ConsoleRequest
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from gateway.wire.admin.mcp_rules import McpRule
from mcp_bridge.caller import Caller
from mcp_bridge.trust.call_records import ALLOWS_ALL, Rules
from mcp_bridge.trust.policy import HINTS, ToolRule

page = ConsolePage(name="mcp/rules", title="Rules", below="mcp")
TONES = {"allow": "ok", "ask": "wait", "deny": "err"}
REASONS = {
    "granted": "A rule grants it, and none asks or denies.",
    "asked": "A rule asks a person first.",
    "denied": "A rule denies it; a deny wins over all others.",
    "not_granted": "No rule grants it at some level: of the organization, or of the project or key "
    "where that has grants of its own.",
    "tainted": "Its caller has heard a server that taints, and the tool may have side effects.",
    "rate": "A rule's bound on calls is reached.",
    "budget": "A rule's budget is spent.",
}
WORDS = {
    "elsewhere": "is of another project or key",
    "other_tools": "is about other tools",
    "no": "its condition does not hold",
    "unknown": "its condition cannot be evaluated: it counts as the stricter answer",
    "matches": "matches",
}
SILENT = ("elsewhere", "other_tools")
OTHERS = "all-others"
MAX_ARGUMENTS = 16 * 1024
MAX_PICO = 10**18


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    service = request.services.mcp
    servers = [] if service is None else sorted(service.pins.of_org(request.org_id))
    async with request.transaction() as conn:
        rules = await read_rules(conn, org_id=request.org_id)
        trial, choices = await tried(request, conn, rules, servers)
    names = {each.id: visible(each.name) for each in choices if each.kind != "tool"}
    after = request.query.get("after", "")
    shown = [each for each in rules.rules if each.id > after]
    table = Table(
        "Rules for calls",
        shown[:ROWS],
        TableColumn("Rule", lambda rule: visible(rule.id)),
        TableColumn("Decision", lambda rule: (rule.effect, TONES[rule.effect]), kind="tag"),
        TableColumn("For", lambda rule: of_whom(rule, names)),
        TableColumn("Tools", lambda rule: visible(", ".join(rule.tools))),
        TableColumn("Tool hints", hints_of),
        TableColumn("Condition", lambda rule: visible(rule.when) or None),
        TableColumn("Answered by", lambda rule: rule.decider if rule.effect == "ask" else None),
        TableColumn("At most", bounds_of),
    )
    return request.render(
        "mcp/rules",
        table=table,
        more=shown[ROWS - 1].id if len(shown) > ROWS else None,
        version=rules.version,
        servers=servers,
        trial=trial,
        chosen_projects=[each for each in choices if each.kind == "project"],
        callers=[each for each in choices if each.kind in ("key", "client")],
        tools=[each for each in choices if each.kind == "tool"],
        silent=() if trial is None else [one for one in trial.words if one.word in SILENT],
        tones=TONES,
        reasons=REASONS,
        words=WORDS,
        hints=[("", "any"), *((each, each) for each in HINTS)],
    )


def of_whom(rule: ToolRule, names: Mapping[str, str]) -> str:
    if rule.level == "org":
        return "all"
    return f"{rule.level} {names.get(rule.of) or visible(rule.of)}"


def hints_of(rule: ToolRule) -> str | None:
    found = [f"{hint} {str(is_so).lower()}" for hint, is_so in rule.annotations.items()]
    return ", ".join(found) or None


def bounds_of(rule: ToolRule) -> str | None:
    found = []
    if rule.rate is not None:
        found.append(f"{rule.rate.calls} calls in {rule.rate.window_s} s")
    if rule.budget is not None:
        found.append(f"${format_usd(rule.budget.amount_pico)} in {rule.budget.window_s} s")
    return ", ".join(found) or None


async def tried(
    request: ConsoleRequest, conn: Any, rules: Rules, servers: list[str]
) -> tuple[Trial | None, list[TrialChoice]]:
    """Return what the rules say of the call that is tried, if one is, and what can be chosen.
    Raises: InvalidField, BadField."""
    choices, tool = choices_query(request.org_id), request.value("tool")
    if not tool:
        return None, await ask(conn, choices)
    from mcp_bridge.trust.read_permit import to_call  # it loads what checks MCP's messages

    server = request.value("server", known=servers)
    arguments = read_arguments(request.query.get("arguments", ""))
    annotations, found = await ask_all(
        conn, annotations_query(request.org_id, server, tool), choices
    )
    caller = Caller(
        org_id=request.org_id,
        project_id=request.value("project"),
        subject="",
        client=request.value("key"),
    )
    call = to_call(caller, server, "tool", tool, arguments=arguments, annotations=annotations or {})
    tainted = (server or "a server",) if request.value("tainted") else ()
    is_approved = annotations is not None
    return try_call(rules, call, is_approved=is_approved, tainted_by=tainted), found


def read_arguments(text: str) -> dict[str, Any]:
    """Raises: InvalidField."""
    if not text.strip():
        return {}
    if len(text) > MAX_ARGUMENTS:
        raise InvalidField("arguments", f"longer than {MAX_ARGUMENTS} characters")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidField("arguments", 'no JSON object, such as {"path": "/tmp"}') from None


@page.post("/set", needs="admin:mcp", again=show)
async def set_rule(request: ConsoleRequest) -> Response[bytes]:
    """Add a rule, or put it in the place of the one of its name.

    The first rule ends that all may be called. Who begins by asking or denying means some calls:
    all others stay allowed, by a rule of their own.
    """
    wanted = read_rule(request)
    return await replace(request, [wanted], gone=wanted.id, text=f"The rule {wanted.id} holds")


@page.post("/remove", needs="admin:mcp", again=show)
async def remove(request: ConsoleRequest) -> Response[bytes]:
    gone = request.form.get("id", "")
    return await replace(request, [], gone=gone, text=f"The rule {gone} is gone")


async def replace(
    request: ConsoleRequest, added: list[ToolRule], *, gone: str, text: str
) -> Response[bytes]:
    """Raises: Conflict, NotFound, InvalidField."""
    service = request.services.mcp

    def check(before: Rules) -> None:
        if before.version != request.form.get("version"):
            raise Conflict("version", "somebody else changed the rules: look at them again")

    async with request.transaction() as conn:
        before = await read_rules(conn, org_id=request.org_id)
        kept = [each for each in before.rules if each.id != gone and each.id != "default"]
        if not added and len(kept) == len(before.rules):
            raise NotFound("id", "there is no such rule")
        text, rules = f"{text}, for every worker within a second", [*kept, *added]
        is_first = ALLOWS_ALL in before.rules
        if is_first and any(each.effect != "allow" for each in added):
            rules.append(msgspec.structs.replace(ALLOWS_ALL, id=OTHERS))
            text += f"; all other calls stay allowed, by the rule {OTHERS}: remove it to deny them"
        await replace_rules(
            conn, org_id=request.org_id, rules=rules, actor=request.actor, check=check
        )
        servers = () if service is None else service.pins.of_org(request.org_id)
        warnings = await warnings_of(conn, org_id=request.org_id, rules=added, servers=servers)
    await announce(request.redis, request.org_id)
    words = "; ".join([text, *warnings])
    return request.done(f"{visible(words)}.", tone="wait" if warnings else "ok")


def read_rule(request: ConsoleRequest) -> ToolRule:
    """Raises: InvalidField."""
    form = {name: value.strip() for name, value in request.form.items()}
    tools = [each for each in form.get("tools", "").replace(",", "\n").split() if each]
    hint = form.get("hint", "")
    written: dict[str, Any] = {
        "id": form.get("id", ""),
        "effect": form.get("effect", ""),
        "level": form.get("level", "org"),
        "of": form.get("of", ""),
        "tools": tools or ["*"],
        "annotations": {hint: form.get("hint_is") != "false"} if hint else {},
        "when": form.get("when", ""),
    }
    if form.get("effect") == "ask":
        written["decider"] = form.get("decider", "administrator")
    window = whole("window_s", form.get("window_s") or "60")
    if form.get("calls"):
        written["rate"] = {"calls": whole("calls", form["calls"]), "window_s": window}
    if form.get("usd"):
        written["budget"] = {"amount_pico": pico(form["usd"]), "window_s": window}
    try:
        rule = msgspec.convert(written, McpRule)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        raise InvalidField(path.strip("`$.").partition("[")[0] or "id", message) from None
    return msgspec.convert(msgspec.to_builtins(rule), ToolRule)


def whole(field: str, text: str) -> int:
    """Raises: InvalidField."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidField(field, "give a whole number")
    return int(text)


def pico(text: str) -> int:
    """Raises: InvalidField."""
    try:
        found = usd(text)
    except MoneyError:
        found = -1
    if not 0 <= found <= MAX_PICO:
        raise InvalidField("usd", "give an amount in USD, such as 2.50")
    return found


routes = page.routes
