"""Compares, to the byte, what was approved of a server with what it offers now.

A pin is the whole object as the server sent it (MCP 2025-11-25, server/tools: name, title,
description, schemas, annotations, icons, `_meta`, and whatever is not known here), in its
canonical form, with its SHA-256. Clients are shown the pinned bytes, never the server's. New,
renamed and changed things stay hidden until they are approved; a server whose launch spec is not
the approved one is neither started nor shown (CVE-2025-54136, CVE-2025-54135).

Pure: keeping pins is the caller's. `admits` is asked on every list and again before a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from mcp_bridge.canonical_json import canonical_bytes, digest_of_bytes, pointer
from mcp_bridge.errors import NotCanonical, NotPinnable
from mcp_bridge.text_safety.hidden_text import visible

Kind = Literal["tool", "prompt", "resource", "resource_template", "instructions", "launch"]
State = Literal["unchanged", "new", "changed", "renamed", "removed"]
Key = tuple[Kind, str]

NAMED_BY: Mapping[Kind, str] = {
    "tool": "name",
    "prompt": "name",
    "resource": "uri",
    "resource_template": "uriTemplate",
}
"""The member that tells things of a kind apart; a server has one instructions and one launch."""

MAX_OFFERED = 20_000
MAX_NAME_CHARS = 1_024
MAX_DIFFERENCES = 200
MAX_SHOWN_CHARS = 240
CONTEXT_CHARS = 24


class Pin(msgspec.Struct, frozen=True):
    """A thing to the byte: `body` is its canonical form, `digest` the SHA-256 of that."""

    kind: Kind
    name: str
    digest: str
    body: bytes

    @property
    def key(self) -> Key:
        return self.kind, self.name

    def value(self) -> object:
        return msgspec.json.decode(self.body)


class UnpinnableThing(msgspec.Struct, frozen=True):
    """Something offered that stays hidden whatever is approved, and why."""

    kind: Kind
    name: str
    path: str
    reason: str


class Offer(msgspec.Struct, frozen=True):
    """Everything a server offers at one time."""

    pins: Mapping[Key, Pin]
    unpinnable: tuple[UnpinnableThing, ...] = ()


class ApprovedPins(msgspec.Struct, frozen=True):
    """The pins that were approved of one server."""

    pins: Mapping[Key, Pin] = {}

    def admits(self, pin: Pin) -> bool:
        """True if exactly this is approved: asked for a list, and again before the call."""
        kept = self.pins.get(pin.key)
        return kept is not None and kept.digest == pin.digest

    def may_start(self, launch: Pin) -> bool:
        """True if a process may be started, or a URL dialled, by this launch spec."""
        return launch.kind == "launch" and self.admits(launch)


class Change(msgspec.Struct, frozen=True):
    state: State
    kind: Kind
    name: str
    was: Pin | None
    now: Pin | None


class Difference(msgspec.Struct, frozen=True):
    """A place where two documents differ.

    `was` and `now` are JSON made visible, shortened around where they part; None where there was,
    or is, nothing.
    """

    path: str
    was: str | None
    now: str | None


class Listing(msgspec.Struct, frozen=True):
    """The pins that clients see of a server; `stale` while it does not answer and the approved pins
    stand in."""

    pins: tuple[Pin, ...]
    stale: bool
    hidden: tuple[Change, ...] = ()


def pin_of(kind: Kind, value: object) -> Pin:
    """Return the pin of one thing as the server sent it: an object with the member of NAMED_BY, or
    the text of instructions, or any JSON for a launch spec. NotPinnable, NotCanonical."""
    body = canonical_bytes(value)
    return Pin(kind, name_of(kind, value), digest_of_bytes(body), body)


def name_of(kind: Kind, value: object) -> str:
    member = NAMED_BY.get(kind)
    if member is None:
        if kind == "instructions" and not isinstance(value, str):
            raise NotPinnable("", "instructions are text")
        return ""
    name = value.get(member) if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or "\0" in name:
        raise NotPinnable(pointer((member,)), f"a {kind} has 1 to {MAX_NAME_CHARS} characters here")
    return name


def offer_of(things: Iterable[tuple[Kind, object]]) -> Offer:
    """Pins of everything offered. What is offered twice under one name is not pinned at all:
    which of the two a call would reach is the server's choice."""
    pins: list[Pin] = []
    unpinnable: list[UnpinnableThing] = []
    for count, (kind, value) in enumerate(things):
        if count == MAX_OFFERED:
            raise NotPinnable("", f"more than {MAX_OFFERED} things from one server")
        try:
            pins.append(pin_of(kind, value))
        except (NotPinnable, NotCanonical) as error:
            unpinnable.append(
                UnpinnableThing(kind, shown_name(kind, value), error.path, error.message)
            )
    counts = Counter(pin.key for pin in pins)
    for (kind, name), times in counts.items():
        if times > 1:
            unpinnable.append(UnpinnableThing(kind, name, "", f"offered {times} times"))
    return Offer({pin.key: pin for pin in pins if counts[pin.key] == 1}, tuple(unpinnable))


def shown_name(kind: Kind, value: object) -> str:
    name = value.get(NAMED_BY.get(kind, "")) if isinstance(value, Mapping) else None
    return visible(name[:MAX_SHOWN_CHARS]) if isinstance(name, str) else ""


def compare(approved: ApprovedPins, offer: Offer) -> tuple[Change, ...]:
    """Return every approved and every offered thing once, by kind and name.

    What went under one name and came under another, otherwise the same, is one change: renamed.
    """
    gone = {key: pin for key, pin in approved.pins.items() if key not in offer.pins}
    came = {key: pin for key, pin in offer.pins.items() if key not in approved.pins}
    changes = [
        Change("unchanged" if approved.admits(now) else "changed", *key, approved.pins[key], now)
        for key, now in offer.pins.items()
        if key in approved.pins
    ]
    left: dict[tuple[Kind, str], list[Pin]] = {}
    for pin in gone.values():
        left.setdefault((pin.kind, nameless_digest(pin)), []).append(pin)
    for key, now in came.items():
        alike = left.get((now.kind, nameless_digest(now)))
        was = alike.pop() if alike else None
        changes.append(Change("renamed" if was else "new", *key, was, now))
    changes += (
        Change("removed", was.kind, was.name, was, None) for same in left.values() for was in same
    )
    return tuple(sorted(changes, key=lambda one: (one.kind, one.name)))


def nameless_digest(pin: Pin) -> str:
    value = pin.value()
    member = NAMED_BY.get(pin.kind)
    if isinstance(value, dict) and member:
        value = {key: inner for key, inner in value.items() if key != member}
    return digest_of_bytes(canonical_bytes(value))


def listing(approved: ApprovedPins, offer: Offer | None, launch: Pin) -> Listing:
    """Return what clients may see: approved pins that the server still offers unchanged.

    `offer` None is a server that does not answer: its approved catalogue is listed, marked. With
    a launch spec that is not approved there is nothing to see.
    """
    if not approved.may_start(launch):
        change = Change("changed", "launch", "", approved.pins.get(launch.key), launch)
        return Listing((), stale=False, hidden=(change,))
    if offer is None:
        kept = (pin for pin in approved.pins.values() if pin.kind != "launch")
        return Listing(tuple(sorted(kept, key=lambda pin: pin.key)), stale=True)
    changes = [one for one in compare(approved, offer) if one.kind != "launch"]
    return Listing(
        tuple(one.was for one in changes if one.state == "unchanged" and one.was is not None),
        stale=False,
        hidden=tuple(one for one in changes if one.state != "unchanged"),
    )


def approve(approved: ApprovedPins, changes: Iterable[Change]) -> ApprovedPins:
    """Return what is approved once a person has approved these changes, as they were shown."""
    pins = dict(approved.pins)
    for change in changes:
        if change.was is not None:
            pins.pop(change.was.key, None)
        if change.now is not None:
            pins[change.now.key] = change.now
    return ApprovedPins(pins)


def differences(old: object, new: object) -> tuple[Difference, ...]:
    """Return where two JSON values differ, by pointer, in document order, at most
    MAX_DIFFERENCES."""
    found: list[Difference] = []
    waiting: list[tuple[tuple[str | int, ...], object, object]] = [((), old, new)]
    while waiting and len(found) < MAX_DIFFERENCES:
        parts, was, now = waiting.pop()
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            keys = sorted({*was, *now}, reverse=True)
            waiting.extend(((*parts, k), was.get(k, ABSENT), now.get(k, ABSENT)) for k in keys)
        elif isinstance(was, list) and isinstance(now, list):
            places = reversed(range(max(len(was), len(now))))
            waiting.extend(((*parts, at), item(was, at), item(now, at)) for at in places)
        elif was is ABSENT or now is ABSENT or canonical_bytes(was) != canonical_bytes(now):
            found.append(shown(parts, was, now))
    return tuple(found)


ABSENT = object()


def item(values: list[object], at: int) -> object:
    return values[at] if at < len(values) else ABSENT


def shown(parts: tuple[str | int, ...], was: object, now: object) -> Difference:
    texts = [None if one is ABSENT else written(one) for one in (was, now)]
    start = 0
    if texts[0] is not None and texts[1] is not None:
        start = max(0, common_prefix(texts[0], texts[1]) - CONTEXT_CHARS)
    return Difference(
        visible(pointer(parts)), *(None if one is None else cut(one, start) for one in texts)
    )


def written(value: object) -> str:
    """JSON in which what JSON itself would leave invisible is seen."""
    plain = visible(value) if isinstance(value, str) else value
    return visible(msgspec.json.encode(plain).decode())


def common_prefix(one: str, other: str) -> int:
    at = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        at += 1
    return at


def cut(text: str, start: int) -> str:
    head = "…" if start else ""
    tail = "…" if len(text) - start > MAX_SHOWN_CHARS else ""
    return f"{head}{text[start : start + MAX_SHOWN_CHARS]}{tail}"
