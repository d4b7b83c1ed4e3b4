"""Pins: compares, to the byte, what was approved of a server with what it offers now.

A pin is the whole object as the server sent it (MCP 2025-11-25, server/tools: name, title,
description, schemas, annotations, icons, `_meta` and unknown members), in its canonical form, with
its SHA-256. Clients see the pinned bytes, never the server's. New, renamed and changed items stay
hidden until they are approved; a server whose launch spec is not the approved one is neither
started nor listed (CVE-2025-54136, CVE-2025-54135).

Pure: the caller stores pins. `admits` is checked for every list and again before a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from mcp_bridge.canonical_json import canonical_bytes, digest_of_bytes, plain_json, pointer
from mcp_bridge.errors import NotCanonical, NotPinnable
from mcp_bridge.protocol.repeated_keys import REFUSED
from mcp_bridge.text_safety.hidden_text import visible

Kind = Literal["tool", "prompt", "resource", "resource_template", "instructions", "launch"]
State = Literal["unchanged", "new", "changed", "renamed", "removed"]
Key = tuple[Kind, str]
CheckItem = Callable[[Kind, object], None]
"""Raises: NotPinnable, for what is no item of its kind."""

NAMED_BY: Mapping[Kind, str] = {
    "tool": "name",
    "prompt": "name",
    "resource": "uri",
    "resource_template": "uriTemplate",
}
"""The member that identifies an item of a kind; a server has one instructions and one launch."""

MAX_OFFERED = 20_000
MAX_NAME_CHARS = 1_024
MAX_DIFFERENCES = 200
MAX_SHOWN_CHARS = 240
CONTEXT_CHARS = 24


class Pin(msgspec.Struct, frozen=True):
    """An item to the byte: `body` is its canonical form, `digest` the SHA-256 of that."""

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
    """An offered item that stays hidden whatever is approved, and why."""

    kind: Kind
    name: str
    path: str
    reason: str


class Offer(msgspec.Struct, frozen=True):
    """Everything a server offers at one time."""

    pins: Mapping[Key, Pin]
    unpinnable: tuple[UnpinnableThing, ...] = ()


class ApprovedPins(msgspec.Struct, frozen=True):
    """The approved pins of one server."""

    pins: Mapping[Key, Pin] = {}

    def admits(self, pin: Pin) -> bool:
        """True if exactly this pin is approved."""
        approved = self.pins.get(pin.key)
        return approved is not None and approved.digest == pin.digest

    def may_start(self, launch: Pin) -> bool:
        """True if this launch spec may be used to start a process or dial a URL."""
        return launch.kind == "launch" and self.admits(launch)


class Change(msgspec.Struct, frozen=True):
    state: State
    kind: Kind
    name: str
    was: Pin | None
    now: Pin | None


class Difference(msgspec.Struct, frozen=True):
    """A place where two documents differ.

    `was` and `now` are JSON with hidden characters escaped, cut to where they differ; None: absent.
    """

    path: str
    was: str | None
    now: str | None


class Listing(msgspec.Struct, frozen=True):
    """The pins that clients see of a server; `stale` while the server does not answer and its
    approved pins are listed instead."""

    pins: tuple[Pin, ...]
    stale: bool
    hidden: tuple[Change, ...] = ()
    refused: tuple[UnpinnableThing, ...] = ()
    """Names what was approved, and cannot be pinned as it is offered now."""


def pin_of(kind: Kind, value: object) -> Pin:
    """Return the pin of one item as the server sent it: an object with its NAMED_BY member, the
    text of instructions, or any JSON for a launch spec. Raises: NotPinnable, NotCanonical."""
    if isinstance(value, Mapping) and REFUSED in value:
        raise NotPinnable(*refusal_of(value[REFUSED]))
    body = plain_json(value) or canonical_bytes(value)
    return Pin(kind, name_of(kind, value), digest_of_bytes(body), body)


def refusal_of(mark: object) -> tuple[str, str]:
    """Return the place and the reason of a definition that was refused when it was read."""
    match mark:
        case [str(path), str(reason)]:
            return visible(path), visible(reason)
    return "", "a member that only the gateway writes"


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


def offer_of(things: Iterable[tuple[Kind, object]], check: CheckItem | None = None) -> Offer:
    """Pin everything that a server offers. A name that is offered twice is not pinned: the server
    could choose which of the two a call reaches. `check`: refuses an item. Raises: NotPinnable, for
    too many items."""
    pins: list[Pin] = []
    unpinnable: list[UnpinnableThing] = []
    for count, (kind, value) in enumerate(things):
        if count == MAX_OFFERED:
            raise NotPinnable("", f"more than {MAX_OFFERED} things from one server")
        try:
            pin = pin_of(kind, value)
            if check is not None:
                check(kind, value)
            pins.append(pin)
        except (NotPinnable, NotCanonical) as error:
            unpinnable.append(
                UnpinnableThing(kind, display_name(kind, value), error.param, error.message)
            )
    counts = Counter(pin.key for pin in pins)
    for (kind, name), times in counts.items():
        if times > 1:
            unpinnable.append(UnpinnableThing(kind, name, "", f"offered {times} times"))
    return Offer({pin.key: pin for pin in pins if counts[pin.key] == 1}, tuple(unpinnable))


def display_name(kind: Kind, value: object) -> str:
    name = value.get(NAMED_BY.get(kind, "")) if isinstance(value, Mapping) else None
    return visible(name[:MAX_SHOWN_CHARS]) if isinstance(name, str) else ""


def compare(approved: ApprovedPins, offer: Offer) -> tuple[Change, ...]:
    """Return every approved and every offered item once, by kind and name.

    An item that disappeared and one that appeared are one change, `renamed`, if they differ only in
    their names.
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
        # Without anything new nothing was renamed.
        digest = nameless_digest(pin) if came else pin.digest
        left.setdefault((pin.kind, digest), []).append(pin)
    for key, now in came.items():
        alike = left.get((now.kind, nameless_digest(now))) if left else None
        was = alike.pop() if alike else None
        changes.append(Change("renamed" if was else "new", *key, was, now))
    changes += (
        Change("removed", was.kind, was.name, was, None) for same in left.values() for was in same
    )
    return tuple(sorted(changes, key=lambda one: (one.kind, one.name)))


def nameless_digest(pin: Pin) -> str:
    """Return a digest that is equal for pins that differ only in their names."""
    value = pin.value()
    member = NAMED_BY.get(pin.kind)
    if isinstance(value, dict) and member:
        value = {key: inner for key, inner in value.items() if key != member}
    return digest_of_bytes(plain_json(value) or canonical_bytes(value))


def to_listing(approved: ApprovedPins, offer: Offer | None, launch: Pin) -> Listing:
    """Return what clients may see: approved pins that the server still offers unchanged.

    `offer` None: the server does not answer, and its approved pins are listed as stale. A launch
    spec that is not approved makes the list empty.
    """
    if not approved.may_start(launch):
        change = Change("changed", "launch", "", approved.pins.get(launch.key), launch)
        return Listing((), stale=False, hidden=(change,))
    if offer is None:
        pins = (pin for pin in approved.pins.values() if pin.kind != "launch")
        return Listing(tuple(sorted(pins, key=lambda pin: pin.key)), stale=True)
    changes = [one for one in compare(approved, offer) if one.kind != "launch"]
    return Listing(
        tuple(one.was for one in changes if one.state == "unchanged" and one.was is not None),
        stale=False,
        hidden=tuple(one for one in changes if one.state != "unchanged"),
        refused=tuple(one for one in offer.unpinnable if (one.kind, one.name) in approved.pins),
    )


def approve(approved: ApprovedPins, changes: Iterable[Change]) -> ApprovedPins:
    """Return the approved pins after a person has approved these changes."""
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
            waiting.extend(((*parts, at), item_at(was, at), item_at(now, at)) for at in places)
        elif is_different(was, now):
            found.append(to_difference(parts, was, now))
    return tuple(found)


def is_different(was: object, now: object) -> bool:
    if isinstance(was, str) and isinstance(now, str):
        return was != now
    return was is ABSENT or now is ABSENT or canonical_bytes(was) != canonical_bytes(now)


ABSENT = object()


def item_at(values: list[object], at: int) -> object:
    return values[at] if at < len(values) else ABSENT


def to_difference(parts: tuple[str | int, ...], was: object, now: object) -> Difference:
    texts = [None if one is ABSENT else visible_json(one) for one in (was, now)]
    start = 0
    if texts[0] is not None and texts[1] is not None:
        start = max(0, common_prefix(texts[0], texts[1]) - CONTEXT_CHARS)
    return Difference(
        visible(pointer(parts)), *(None if one is None else cut(one, start) for one in texts)
    )


def visible_json(value: object) -> str:
    """Return JSON with hidden characters escaped, also those that JSON leaves as they are."""
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
