"""Decides what a caller sees of a list: without items that rules always deny, and without
unapproved items that the scanner flags.

Rules with a condition count as maybe. The view of a list is kept with it, by the rules' version and
by the caller's project and key if rules are about them.
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
from mcp_bridge.trust.policy import concerns, may_ever
from mcp_bridge.trust.read_permit import READS_ONLY, to_call
from mcp_bridge.trust.scan import scan, worst
from mcp_bridge.validation.results import annotations_of

T = TypeVar("T")

MAX_VIEWS = 64
"""Bounds the views of one list, in one worker."""
MAX_IN_LOOP = 20_000
"""Comparisons of rules with items in the event loop; more of them run in a thread."""
MAX_SCREENED = 4_096
CHANGES: Mapping[Kind, str] = {
    "tool": "notifications/tools/list_changed",
    "prompt": "notifications/prompts/list_changed",
}
"""The notification that a list changed, by its kind."""
WILD = re.compile(r"[*?\[]")
RESOURCES_CHANGED = "notifications/resources/list_changed"


class Screen:
    """Scans items, and remembers the verdict on each."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def harmless(self, items: list[Any]) -> list[Any]:
        """Return the items that are; runs in a thread."""
        return [item for item in items if self.is_harmless(item)]

    def is_harmless(self, item: Any) -> bool:
        key = hashlib.sha256(msgspec.json.encode(item)).digest()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_SCREENED:
                self._known.clear()
            found = self._known[key] = worst(scan("resource", item)) != "high"
        return found


class Viewer(msgspec.Struct, frozen=True):
    """A caller who looks at the lists of one server, under the rules of the organization."""

    caller: Caller
    server: str
    rules: Rules

    async def view_of(self, shown: VisibleList, kind: Kind) -> VisibleList:
        """Return the part of a list that the caller sees; it is kept with the list."""
        levels = {(rule.level, rule.of) for rule in self.rules.rules if rule.of}
        mine = (("project", self.caller.project_id), ("key", self.caller.client))
        key = (self.rules.version, *(of if (level, of) in levels else "" for level, of in mine))
        found = shown.views.get(key)
        if found is None:
            pins = await self._shown_pins(shown.pins, kind)
            found = shown if len(pins) == len(shown.pins) else shown.without_others(pins)
            if len(shown.views) >= MAX_VIEWS:
                shown.views.clear()
            shown.views[key] = found
        return found

    async def digests_of(self, shown: Mapping[Kind, VisibleList]) -> dict[str, bytes]:
        """Return a digest of each list, by the notification that it changed. Resources are not
        pinned: theirs is the digest of the rules that can be about one."""
        found = {RESOURCES_CHANGED: self._digest_of_resource_rules()}
        for kind, method in CHANGES.items():
            found[method] = (await self.view_of(shown[kind], kind)).digest
        return found

    def _digest_of_resource_rules(self) -> bytes:
        call = to_call(self.caller, self.server, "resource", "", arguments={})
        found = {
            (
                each.level,
                each.effect,
                each.tools,
                tuple(sorted(each.annotations.items())),
                each.when,
            )
            for each in self.rules.rules
            if concerns(each, call) and any(may_name(glob, call.alias) for glob in each.tools)
        }
        return hashlib.sha256(msgspec.json.encode(sorted(found))).digest()

    async def _shown_pins(self, pins: Sequence[Pin], kind: Kind) -> tuple[Pin, ...]:
        by_hints = kind == "tool" and any(rule.annotations for rule in self.rules.rules)

        def shows(pin: Pin) -> bool:
            return self.shows(kind, pin.name, hints_of(pin) if by_hints else {})

        return tuple(await self._filtered(pins, shows))

    async def shown_resources(self, items: list[Any], member: str) -> list[Any]:
        """Return the resources that no rule always denies. `member`: the one that has the URI."""

        def shows(item: Any) -> bool:
            return not isinstance(item, dict) or self.shows("resource", str(item.get(member)))

        return await self._filtered(items, shows)

    async def _filtered(self, items: Sequence[T], shows: Callable[[T], bool]) -> list[T]:
        """Return the items that are shown; many are looked at in a thread."""
        if len(items) * len(self.rules.rules) > MAX_IN_LOOP:
            return await asyncio.to_thread(lambda: list(filter(shows, items)))
        return list(filter(shows, items))

    def shows(self, kind: Kind, name: str, annotations: Mapping[str, object] = {}) -> bool:
        """True if the rules can permit the tool, prompt or resource with some arguments."""
        is_tool = kind == "tool"
        hints = annotations if is_tool else READS_ONLY
        call = to_call(self.caller, self.server, kind, name, arguments={}, annotations=hints)
        return may_ever(call, self.rules.rules, asks=is_tool)


def may_name(glob: str, beginning: str) -> bool:
    """True if the glob can match the URI of a resource, behind `beginning`."""
    fixed = WILD.split(glob, maxsplit=1)[0]
    if fixed == glob:
        return glob.startswith(beginning) and ":" in glob
    return fixed.startswith(beginning) or beginning.startswith(fixed)


def hints_of(pin: Pin) -> Mapping[str, object]:
    value = pin.value()
    return annotations_of(value) if isinstance(value, dict) else {}
