"""Decides what a caller sees of a list: without items that rules always deny, and without
unapproved items that the scanner flags.

Rules with a condition count as maybe. What is shown of a list is kept with it, by the rules'
version and by those of the caller's project and key of which rules speak.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.pinning import Kind, Pin
from mcp_bridge.routing.catalog import VisibleList
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.policy import ToolRule, concerns, may_ever
from mcp_bridge.trust.read_permit import READS_ONLY, to_call
from mcp_bridge.trust.scan import scan, worst
from mcp_bridge.validation.results import annotations_of

T = TypeVar("T")

MAX_VIEWS = 64
"""Of one list, in one worker."""
AT_ONCE = 20_000
"""How often a rule is held to a thing while others wait."""
MAX_SCREENED = 4_096
CHANGES: Mapping[Kind, str] = {
    "tool": "notifications/tools/list_changed",
    "prompt": "notifications/prompts/list_changed",
}
"""By what is listed."""
WILD = re.compile(r"[*?\[]")
RESOURCES_CHANGED = "notifications/resources/list_changed"


class Screen:
    """Keeps what it said of each thing."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def is_harmless(self, item: Any) -> bool:
        key = hashlib.sha256(msgspec.json.encode(item)).digest()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_SCREENED:
                self._known.clear()
            found = self._known[key] = worst(scan("resource", item)) != "high"
        return found


async def view_of(
    shown: VisibleList, kind: Kind, *, caller: Caller, server: str, rules: Rules
) -> VisibleList:
    project, client = spoken_of(rules, caller)
    key = (rules.version, project, client)
    found = shown.views.get(key)
    if found is None:
        kept = await those_shown(shown.pins, kind, caller, server, rules)
        found = shown if len(kept) == len(shown.pins) else shown.without_others(kept)
        if len(shown.views) >= MAX_VIEWS:
            shown.views.clear()
        shown.views[key] = found
    return found


async def digests_of(
    shown: Mapping[Kind, VisibleList], *, caller: Caller, server: str, rules: Rules
) -> dict[str, bytes]:
    """Return a digest of each list, by the notification that it changed.

    Nobody knows what resources there are: of them it is that of the rules that can be about one.
    """
    found = {RESOURCES_CHANGED: digest_of_rules(rules.rules, caller, server)}
    for kind, method in CHANGES.items():
        view = await view_of(shown[kind], kind, caller=caller, server=server, rules=rules)
        found[method] = view.digest
    return found


def digest_of_rules(rules: Sequence[ToolRule], caller: Caller, server: str) -> bytes:
    """Return a digest of what decides whether somebody is shown a resource of a server."""
    call = to_call(caller, server, "resource", "", arguments={})
    said = {
        (rule.level, rule.effect, rule.tools, tuple(sorted(rule.annotations.items())), rule.when)
        for rule in rules
        if concerns(rule, call) and any(may_name(glob, call.alias) for glob in rule.tools)
    }
    return hashlib.sha256(msgspec.json.encode(sorted(said))).digest()


def may_name(glob: str, beginning: str) -> bool:
    """True if the glob can match the URI of a resource, behind `beginning`."""
    fixed = WILD.split(glob, maxsplit=1)[0]
    if fixed == glob:
        return glob.startswith(beginning) and ":" in glob
    return fixed.startswith(beginning) or beginning.startswith(fixed)


def spoken_of(rules: Rules, caller: Caller) -> tuple[str, str]:
    """The caller's project and key, each empty where no rule is about it."""
    levels = {(rule.level, rule.of) for rule in rules.rules if rule.of}
    project = caller.project_id if ("project", caller.project_id) in levels else ""
    return project, caller.client if ("key", caller.client) in levels else ""


async def those_shown(
    pins: Sequence[Pin], kind: Kind, caller: Caller, server: str, rules: Rules
) -> tuple[Pin, ...]:
    by_hints = kind == "tool" and any(rule.annotations for rule in rules.rules)

    def shown() -> tuple[Pin, ...]:
        return tuple(
            pin
            for pin in pins
            if shows(rules.rules, caller, server, kind, pin.name, hints_of(pin) if by_hints else {})
        )

    return await soon(shown, len(pins) * len(rules.rules))


async def resources_shown(
    items: list[Any], member: str, caller: Caller, server: str, rules: Rules
) -> list[Any]:
    """Return the resources that the rules do not always deny. `member`: where each has its URI."""

    def shown() -> list[Any]:
        return [
            item
            for item in items
            if not isinstance(item, dict)
            or shows(rules.rules, caller, server, "resource", str(item.get(member)), {})
        ]

    return await soon(shown, len(items) * len(rules.rules))


async def soon(work: Callable[[], T], size: int) -> T:
    return await asyncio.to_thread(work) if size > AT_ONCE else work()


def shows(
    rules: Sequence[ToolRule],
    caller: Caller,
    server: str,
    kind: Kind,
    name: str,
    annotations: Mapping[str, object],
) -> bool:
    is_tool = kind == "tool"
    said = annotations if is_tool else READS_ONLY
    call = to_call(caller, server, kind, name, arguments={}, annotations=said)
    return may_ever(call, rules, asks=is_tool)


def hints_of(pin: Pin) -> Mapping[str, object]:
    value = pin.value()
    return annotations_of(value) if isinstance(value, dict) else {}
