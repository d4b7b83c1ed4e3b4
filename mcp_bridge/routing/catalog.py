"""Keeps what servers offer now, compared with what was approved of them: the lists that clients
see.

A server's whole offer is asked for again when it says that it changed, when a session with it
begins, and once it is as old as its `recheck_s` says: at 0 before each request, over a connection
that the request itself uses then. Requests that come meanwhile share the next check. A server that
does not answer has its approved offer listed, marked.

The store is the caller's and says by the identity of what it returns whether anything changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec

from mcp_bridge.errors import NotPinnable
from mcp_bridge.pinning import (
    ApprovedPins,
    Change,
    Key,
    Kind,
    Listing,
    Offer,
    Pin,
    UnpinnableThing,
    compare,
    offer_of,
    pin_of,
    to_listing,
)
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.upstream.upstream import ServerConfig, Upstream
from mcp_bridge.validation.message_shapes import definition_problem

log = logging.getLogger(__name__)

MAX_LAUNCHES = 1024
MAX_IN_LOOP = 500
"""The things of an offer that are compared in the event loop: some milliseconds."""
TASKS = "execution"


KIND_OF: Mapping[str, Kind] = {
    "tools/list": "tool",
    "tools/call": "tool",
    "prompts/list": "prompt",
    "prompts/get": "prompt",
}
"""The methods that are about what is pinned."""


class FetchedOffer(msgspec.Struct, frozen=True):
    """Everything of a server that is pinned, as it offers it now. `generation`: the server's
    (`Upstream.generation`) when it was asked. `digest`: SHA-256; of other things it is another."""

    things: tuple[tuple[Kind, object], ...]
    generation: int
    digest: bytes


class VisibleList:
    """A list as clients see it: `pins`, ordered by the server's own names. `stale`: the server does
    not answer, and its approved pins are listed instead. It never changes, so its encoded form is
    kept with it."""

    def __init__(self, pins: tuple[Pin, ...], *, stale: bool) -> None:
        self.pins, self.stale = pins, stale
        self.views: dict[tuple[str, ...], VisibleList] = {}
        """The parts of the list that callers see (`trust.visibility`)."""
        self._digest: bytes | None = None
        self._written: dict[str, dict[str, msgspec.Raw | None]] = {}

    @property
    def digest(self) -> bytes:
        """SHA-256; of other things it is another."""
        if self._digest is None:
            said = "\n".join(pin.digest for pin in self.pins)
            self._digest = hashlib.sha256(said.encode()).digest()
        return self._digest

    def without_others(self, pins: tuple[Pin, ...]) -> VisibleList:
        """Return a subset of these pins that shares what is written of them."""
        found = VisibleList(pins, stale=self.stale)
        found._written = self._written
        return found

    def written(
        self, label: str, alias_of: Callable[[str], str | None], first: int, end: int
    ) -> list[msgspec.Raw]:
        """Return the pins from `first` to before `end` as JSON, each by its alias, without those
        that have none. `label`: the prefix of all aliases, which identifies them. A page at a time,
        so that nobody waits for twenty thousand."""
        kept = self._written.setdefault(label, {})
        asked = self.pins[first:end]
        new = [pin for pin in asked if pin.name not in kept]
        for pin in new:  # all, before any is written: of two that are one neither is
            alias_of(pin.name)
        for pin in new:
            kept[pin.name] = written(pin, alias_of(pin.name))
        return [found for pin in asked if (found := kept[pin.name]) is not None]


def written(pin: Pin, alias: str | None) -> msgspec.Raw | None:
    """Return a thing as clients see it, by its alias. Of a tool `execution` is left out: it offers
    tasks, which 2025-11-25 alone has and the bridge does not serve."""
    if alias is None:
        return None
    body = pin.body
    has_tasks = pin.kind == "tool" and TASKS.encode() in body
    if alias == pin.name and not has_tasks:
        return msgspec.Raw(body)
    value = pin.value()
    assert isinstance(value, dict)
    kept = {name: each for name, each in value.items() if not has_tasks or name != TASKS}
    return msgspec.Raw(msgspec.json.encode({**kept, "name": alias}))


Fetch = Callable[[Upstream], Awaitable[FetchedOffer]]
"""Asks a server for all that it offers. Raises: RpcError."""


class PinStore(Protocol):
    async def approved(self, org_id: str, server: str) -> ApprovedPins:
        """Return the approved pins: the same object for as long as nothing changed."""
        ...


class ServerListing(msgspec.Struct, frozen=True):
    """A server's lists as clients see them. `pins` and `shown` have only what is approved,
    `refused` what would be there but for what is wrong with it. It is made anew whenever the offer
    or what is approved of it changes, and never changes itself."""

    listing: Listing
    pins: Mapping[Key, Pin]
    shown: Mapping[Kind, VisibleList]
    refused: Mapping[Key, UnpinnableThing] = {}

    @property
    def stale(self) -> bool:
        return self.listing.stale


class CurrentListing(msgspec.Struct, frozen=True):
    """A server's lists, and how old they are. `age_s`: seconds since the server was asked for them;
    None: it was asked for the request itself."""

    seen: ServerListing
    age_s: float | None


class CatalogEntry:
    """The known offer of one server, as one tenant reaches it."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.begun = self.done = 0
        """The numbers of the last check that began, and of the last that ended."""
        self.checked_at = 0.0
        """When that one began: what the server changed since may have been missed."""
        self.generation = -1
        self.offer: Offer | None = None
        self.digest: bytes | None = None
        """The digest of the offer as it came, so that the same one is not parsed twice."""
        self.approved: ApprovedPins | None = None
        self.seen: ServerListing | None = None
        self.last: ServerListing | None = None
        """The one before, while there is no other."""


class Catalog:
    """Caches the listings of servers. `now_s`: monotonic seconds."""

    def __init__(
        self,
        pins: PinStore,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pins, self._now_s = pins, now_s
        self.noticed: list[Callable[[str, Upstream], None]] = []
        """Told of an org's server of which other things are shown, since it offers others."""
        self.compared: list[Callable[[str, str, Sequence[Change]], None]] = []
        """Told of an org's server, and of what it offers that is hidden, each time that either its
        offer or what is approved of it is another. Waits for nothing."""
        self._entries: WeakKeyDictionary[Upstream, CatalogEntry] = WeakKeyDictionary()

    async def opens(self, org_id: str, config: ServerConfig) -> bool:
        if config.trust == "all":
            return True
        return (await self._pins.approved(org_id, config.name)).may_start(launch_pin(config))

    async def admits(self, org_id: str, config: ServerConfig, pin: Pin) -> bool:
        if config.trust == "all":
            return True
        return (await self._pins.approved(org_id, config.name)).admits(pin)

    async def current(
        self, org_id: str, upstream: Upstream, fetch: Fetch, *, passes_on: bool = True
    ) -> CurrentListing:
        """Return what clients of an org see of a server now. `fetch` asks the server for its
        offer, where what is known is too old. `passes_on`: tell `noticed` of another offer; False
        for who was told already, or two would tell each other forever of a server that never
        offers the same twice."""
        entry = self._entries.setdefault(upstream, CatalogEntry())
        came_after = entry.begun
        async with entry.turn:
            if not self._is_fresh(entry, upstream, came_after):
                await self._refresh(entry, upstream, fetch)
            age_s = None if entry.done > came_after else self._now_s() - entry.checked_at
            approved = await self._pins.approved(org_id, upstream.name)
            if entry.seen is None or entry.approved is not approved:
                before = entry.last if entry.seen is None else None
                entry.approved = approved
                entry.seen = entry.last = await listed(upstream.config, approved, entry.offer)
                self._tell_hidden(org_id, upstream, entry.seen)
                if before is not None and passes_on and differs(before, entry.seen):
                    for noticed in self.noticed:
                        noticed(org_id, upstream)
            return CurrentListing(entry.seen, age_s)

    def _is_fresh(self, entry: CatalogEntry, upstream: Upstream, came_after: int) -> bool:
        """True if no check is needed for a request. `came_after`: the check that had begun before
        it came; of those after it, any will do."""
        if entry.generation != upstream.generation:
            return False
        is_new = self._now_s() < entry.checked_at + upstream.config.recheck_s
        return entry.done > came_after or (is_new and entry.done > 0)

    async def _refresh(self, entry: CatalogEntry, upstream: Upstream, fetch: Fetch) -> None:
        entry.begun = number = entry.begun + 1
        generation, began_at = upstream.generation, self._now_s()
        try:
            fetched = await fetch(upstream)
            generation = fetched.generation
            if entry.offer is None or fetched.digest != entry.digest:
                # Tens of milliseconds for a thousand tools, which nobody else should wait for.
                entry.offer = await asyncio.to_thread(offer_of, fetched.things, check_definition)
                entry.digest, entry.seen = fetched.digest, None
        except (RpcError, NotPinnable) as error:
            log.warning("mcp: %s: its offer cannot be had: %s", upstream.name, error)
            entry.offer = entry.digest = entry.seen = None
        entry.generation, entry.checked_at, entry.done = generation, began_at, number

    def _tell_hidden(self, org_id: str, upstream: Upstream, seen: ServerListing) -> None:
        hidden = seen.listing.hidden
        if hidden:
            log.info("mcp: %s: %d things are hidden until approved", upstream.name, len(hidden))
        if not seen.stale:
            for compared in self.compared:
                compared(org_id, upstream.name, hidden)


def differs(one: ServerListing, other: ServerListing) -> bool:
    return any(one.shown[kind].digest != other.shown[kind].digest for kind in one.shown)


async def listed(
    config: ServerConfig, approved: ApprovedPins, offer: Offer | None
) -> ServerListing:
    """Return the listing; many things are compared beside the event loop."""
    if offer is not None and len(offer.pins) > MAX_IN_LOOP:
        return await asyncio.to_thread(server_listing, config, approved, offer)
    return server_listing(config, approved, offer)


def server_listing(
    config: ServerConfig, approved: ApprovedPins, offer: Offer | None
) -> ServerListing:
    if config.trust != "all":
        found = to_listing(approved, offer, launch_pin(config))
    elif offer is None:
        found = Listing((), stale=True)
    else:
        pins = tuple(sorted(offer.pins.values(), key=lambda pin: pin.key))
        found = Listing(pins, stale=False, refused=offer.unpinnable)
    shown = {
        kind: VisibleList(tuple(pin for pin in found.pins if pin.kind == kind), stale=found.stale)
        for kind in set(KIND_OF.values())
    }
    refused = {(one.kind, one.name): one for one in found.refused}
    return ServerListing(found, {pin.key: pin for pin in found.pins}, shown, refused)


def check_definition(kind: Kind, value: object) -> None:
    """Raises: NotPinnable, for no definition as the protocol has it."""
    wrong = definition_problem(kind, value)
    if wrong is not None:
        raise NotPinnable(wrong.path, wrong.message)


def launch_pin(config: ServerConfig) -> Pin:
    """Return the pin of how a server is reached, to the byte: of its headers and credentials the
    names."""
    if config.launch is not None:
        return pin_of("launch", {"transport": "stdio", **config.launch.to_canonical()})
    if config.document:
        return document_launch_pin(config.document, config.url, *sorted(config.headers))
    return url_launch_pin(config.transport, config.url, *sorted(config.headers))


@lru_cache(maxsize=MAX_LAUNCHES)
def url_launch_pin(transport: str, url: str, *headers: str) -> Pin:
    """Return the launch pin of a server with a URL; cached, since every call needs it."""
    return pin_of("launch", {"transport": transport, "url": url, "headers": list(headers)})


@lru_cache(maxsize=MAX_LAUNCHES)
def document_launch_pin(document: str, url: str, *headers: str) -> Pin:
    where = {"transport": "openapi", "document": document, "url": url}
    return pin_of("launch", {**where, "headers": list(headers)})


def changes_of(config: ServerConfig, approved: ApprovedPins, offer: Offer) -> tuple[Change, ...]:
    """Return all that differs from what was approved, the launch spec among it."""
    launch = launch_pin(config)
    pins = {launch.key: launch, **offer.pins}
    changes = compare(approved, Offer(pins, offer.unpinnable))
    return tuple(change for change in changes if change.state != "unchanged")
