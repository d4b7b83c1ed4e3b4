"""Compares what servers offer now with what an org approved, and approves it. Servers are asked
past the guard, a few at a time, over the bridge's own connections."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.mcp.known import ChangeFeed, announce
from gateway.mcp.pins import (
    approve_changes,
    count_pins,
    read_pins,
    read_pins_of,
    revoke_pins,
)
from gateway.tenancy.changes import EVERYTHING
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from mcp_bridge.errors import BridgeError
from mcp_bridge.pinning import ApprovedPins, Change, Key, Kind, Offer, Pin, UnpinnableThing
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.routing.catalog import changes_of
from mcp_bridge.routing.offer_reader import read_offer
from mcp_bridge.text_safety.hidden_text import visible
from mcp_bridge.trust.meaning import Comparison, MeaningScan
from mcp_bridge.trust.scan import Finding, LabelledPin, scan, scan_together, worst
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.upstream import ServerConfig

MAX_LOOKS = 4
"""Servers that one worker looks at at a time; who comes then waits."""
LOOK_S = 20.0
MAX_PROBLEM = 500
FIELDS: dict[Kind, str] = {"tool": "tools", "prompt": "prompts", "instructions": "instructions"}
"""The request field that lists what is approved or revoked by name, for each kind."""

KEPT_S = 60.0
"""How long a look is kept for whoever turns its pages."""
MAX_KEPT = 16
MAX_SCANNED = 20_000

FoundChange = tuple[Change, tuple[Finding, ...]]
Found = Iterable[FoundChange]
Beside = Mapping[tuple[str, Kind, str], tuple[Finding, ...]]
"""Findings that arise only from a thing's likeness to those of other servers (`scan_together`)."""


class ServerOffer(msgspec.Struct, frozen=True):
    """A server as an admin sees it. `waits`: what is offered and not approved. `problem`: why the
    server could not be asked."""

    config: ServerConfig
    approved: int
    waits: Sequence[Change] = ()
    beside: Beside = {}
    never: tuple[UnpinnableThing, ...] = ()
    problem: str | None = None

    def found(self, first: int = 0, end: int | None = None) -> Iterator[FoundChange]:
        """Yield changes, each with what in it looks like an attack: read as they are asked for, a
        millisecond each."""
        for change in self.waits[first:end]:
            yield change, findings_of(self.config.name, change, self.beside)

    @property
    def digest(self) -> str:
        """Return the digest of all that waits, to the byte."""
        said = hashlib.sha256()
        for change in self.waits:
            was, now = ("" if pin is None else pin.digest for pin in (change.was, change.now))
            said.update(f"{change.kind}\n{change.state}\n{was}\n{now}\n".encode())
        return f"sha256:{said.hexdigest()}"


class Look(msgspec.Struct):
    """A look at what a server offers, or why it could not be asked. `seen`: compared with what is
    approved, once for all pages; None: that has changed since."""

    at: float
    offer: Offer | str
    seen: ServerOffer | None


class PinsAdmin:
    """Approves and revokes pins, in one worker. `servers`: those of the settings. `feed`: tells
    what other workers changed."""

    def __init__(
        self,
        servers: Sequence[ServerConfig],
        transports: Transports,
        info: dict[str, Any],
        db: AsyncEngine,
        redis: Redis,
        feed: ChangeFeed,
        meaning: MeaningScan | None = None,
        compared: Callable[[str, str, Sequence[Change]], None] = lambda org_id, server, waits: None,
    ) -> None:
        """`meaning`: compares what is shown by what it means. None: by its words alone.
        `compared`: is told of each look, with what waits; waits for nothing."""
        self._meaning, self._on_compared = meaning, compared
        self._servers = {each.name: each for each in servers}
        self._transports, self._info = transports, info
        self._db, self._redis, self._feed = db, redis, feed
        self._looks = asyncio.Semaphore(MAX_LOOKS)
        self._kept: OrderedDict[tuple[str, str], Look] = OrderedDict()
        feed.forgetting.append(self._forget)

    def replace(self, servers: Sequence[ServerConfig], meaning: MeaningScan | None) -> None:
        """Look at these servers from now on, all anew."""
        self._servers, self._meaning = {each.name: each for each in servers}, meaning
        self._kept.clear()

    def of_org(self, org_id: str) -> dict[str, ServerConfig]:
        """Return the servers that are there for an org, by name."""
        found = self._servers.items()
        return {name: each for name, each in found if each.audience.has(org_id, None)}

    def named(self, org_id: str, server: str) -> ServerConfig:
        """Raises: NotFound."""
        found = self.of_org(org_id).get(server)
        if found is None:
            raise NotFound("server", f"no server {server!r} is configured")
        return found

    async def known(self, org_id: str) -> list[ServerOffer]:
        """Return all servers by name, without asking any of them."""
        async with tenant(self._db, org_id) as conn:
            counts = await count_pins(conn, org_id=org_id)
        return [
            ServerOffer(each, counts.get(name, 0))
            for name, each in sorted(self.of_org(org_id).items())
        ]

    async def see(self, org_id: str, server: str, *, again: bool = False) -> ServerOffer:
        """Return what a server offers. `again`: who saw it a moment ago sees the same. Raises:
        NotFound."""
        config, key = self.named(org_id, server), (org_id, server)
        look = self._kept.get(key) if again else None
        if look is None or time.monotonic() > look.at + KEPT_S:
            offer = await self._offer(config, org_id)
            look = Look(time.monotonic(), offer, None)
            self._kept[key] = look
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        if look.seen is not None:
            return look.seen
        heard = self._feed.changes
        async with tenant(self._db, org_id) as conn:
            seen = await self._compared(conn, org_id, config, look.offer)
        if self._feed.changes == heard:  # else what was read may be what was before a change
            look.seen = seen
        return seen

    def _forget(self, org_id: str) -> None:
        """Compare what is kept anew: approvals of an org have changed. EVERYTHING: of any org."""
        for (kept_org_id, _), look in self._kept.items():
            if org_id in (EVERYTHING, kept_org_id):
                look.seen = None

    async def compare(self, changes: Iterable[Change]) -> Comparison:
        """Return what means an instruction in what is new, at nobody's expense but the house's."""
        pins = [one.now for one in changes if one.now is not None and one.kind != "launch"]
        if not pins:
            return Comparison()
        if self._meaning is None:
            return Comparison(note="Not compared by meaning: `mcp.scan_model` names no model.")
        return await self._meaning.compare(pins)

    async def approve(
        self,
        org_id: str,
        server: str,
        keys: Collection[Key] | None,
        *,
        actor: Actor,
        check: Callable[[ServerOffer], None],
    ) -> ServerOffer:
        """Approve what a server offers now. `keys` None: all but what looks like an attack.
        `check`: raises unless what is offered now is what was looked at. Raises: NotFound, Conflict
        (the server gives no answer), InvalidField (by the field of one that does not wait),
        ChangeNotAnnounced, whatever `check` raises."""
        config = self.named(org_id, server)
        offer = await self._offer(config, org_id)
        async with tenant(self._db, org_id) as conn:
            seen = await self._compared(conn, org_id, config, offer)
            if seen.problem is not None:
                raise Conflict("server", f"the server {server!r}: {seen.problem}")
            check(seen)
            wanted = await asyncio.to_thread(lambda: chosen(seen.found(), keys))
            await approve_changes(
                conn, org_id=org_id, server=server, pin_changes=wanted, actor=actor
            )
            made = await self._compared(conn, org_id, config, offer)
        self._forget(org_id)
        await announce(self._redis, org_id)
        return made

    async def revoke(
        self, org_id: str, server: str, keys: Collection[Key] | None, *, actor: Actor
    ) -> ServerOffer:
        """Revoke approvals without asking the server. `keys` None: all of them, so that it is not
        dialled. Raises: NotFound, ChangeNotAnnounced."""
        config = self.named(org_id, server)
        async with tenant(self._db, org_id) as conn:
            await revoke_pins(conn, org_id=org_id, server=server, keys=keys, actor=actor)
            left = await read_pins(conn, org_id=org_id, server=server)
        self._forget(org_id)
        await announce(self._redis, org_id)
        return ServerOffer(config, len(left.pins))

    async def _offer(self, config: ServerConfig, org_id: str) -> Offer | str:
        """Return what a server offers, or why it could not be asked."""
        async with self._looks:
            try:
                async with asyncio.timeout(LOOK_S):
                    return await read_offer(
                        config, self._info, self._transports, org_id, close=False
                    )
            except TimeoutError:
                return f"no answer in {LOOK_S:.0f} s"
            except RpcError as error:
                return visible(error.message)[:MAX_PROBLEM]
            except BridgeError as error:
                return visible(str(error))[:MAX_PROBLEM]

    async def _compared(
        self, conn: AsyncConnection, org_id: str, config: ServerConfig, offer: Offer | str
    ) -> ServerOffer:
        approved = await read_pins(conn, org_id=org_id, server=config.name)
        if isinstance(offer, str):
            return ServerOffer(config, len(approved.pins), problem=offer)
        if config.trust == "all":
            return ServerOffer(config, len(approved.pins))
        others = await of_others(conn, self.of_org(org_id), org_id, config.name)
        seen = await asyncio.to_thread(compared, config, approved, offer, others)
        self._on_compared(org_id, config.name, seen.waits if approved.pins else ())
        return seen


async def of_others(
    conn: AsyncConnection, servers: Iterable[str], org_id: str, name: str
) -> list[LabelledPin]:
    """Return what is approved of all other servers."""
    others = [other for other in servers if other != name]
    found = await read_pins_of(conn, org_id=org_id, servers=others)
    return [LabelledPin(other, pin) for other, each in found.items() for pin in each.pins.values()]


def compared(
    config: ServerConfig, approved: ApprovedPins, offer: Offer, others: Iterable[LabelledPin] = ()
) -> ServerOffer:
    """Compare what is offered with what is approved, and with what `others` are approved for."""
    changes = changes_of(config, approved, offer)
    own = [LabelledPin(config.name, pin) for pin in offer.pins.values()]
    beside = scan_together([*own, *others], of=config.name)
    return ServerOffer(config, len(approved.pins), changes, beside, offer.unpinnable)


def findings_of(server: str, change: Change, beside: Beside) -> tuple[Finding, ...]:
    if change.now is None or change.kind == "launch":
        return ()
    return scanned(change.now) + beside.get((server, change.kind, change.name), ())


def scanned(pin: Pin) -> tuple[Finding, ...]:
    """Return what is suspicious about a thing by itself, of which there is one answer for its
    bytes."""
    found = SCANNED.get(pin.digest)
    if found is None:
        if len(SCANNED) >= MAX_SCANNED:
            SCANNED.clear()
        found = SCANNED[pin.digest] = scan(pin.kind, pin.value())
    return found


SCANNED: dict[str, tuple[Finding, ...]] = {}


def keys_of(tools: Iterable[str], prompts: Iterable[str], instructions: bool) -> frozenset[Key]:
    """Return the keys of what a person named."""
    named: list[Key] = [("tool", each) for each in tools]
    named += [("prompt", each) for each in prompts]
    return frozenset([*named, ("instructions", "")] if instructions else named)


def chosen(found: Found, keys: Collection[Key] | None) -> list[Change]:
    """Choose what was named and how the server is reached; with nothing named, all but what looks
    like an attack. Raises: InvalidField."""
    if keys is None:
        return [change for change, findings in found if worst(findings) != "high"]
    changes = [change for change, _ in found]
    waiting = {(change.kind, change.name) for change in changes}
    for kind, name in sorted(keys):
        if (kind, name) not in waiting:
            missing = f"{name}: no {kind} of that name waits" if name else f"no {kind} wait"
            raise InvalidField(FIELDS[kind], missing)
    return [
        change
        for change in changes
        if change.kind == "launch" or (change.kind, change.name) in keys
    ]
