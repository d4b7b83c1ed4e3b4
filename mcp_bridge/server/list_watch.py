"""Tells who listens what lists have become: by an approval, a revocation, other rules, another
offer.

Servers say themselves what changes at them; of what changes here they know nothing. Each listener
is held to what it itself would be shown: so it is told of no list that stays the same to it, and
nobody of another tenant or namespace is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec
from redis.exceptions import RedisError

from foundation.tasks import TaskSet
from mcp_bridge.protocol.eras import LIST_CHANGES
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.guard import Guard
from mcp_bridge.upstream.upstream import Upstream
from mcp_bridge.worker_relay import Payload, Relay

log = logging.getLogger(__name__)

KIND = "shown"
LOOK_S = 20.0  # to ask one server for its offer
AT_ONCE = 8  # servers that one worker asks at once
FIRST_PAUSE_S = 0.5  # between two looks of one listener
LAST_PAUSE_S = 30.0  # after failures

Tell = Callable[[str], Awaitable[None]]
"""Takes the method of a notification."""


class Watch:
    """Watches what one listener is shown of each server. `begin` before `run`."""

    def __init__(self, context: ClientContext, turns: asyncio.Semaphore) -> None:
        self.context = context
        self._turns = turns
        self._poked = asyncio.Event()
        self._known: dict[str, Mapping[str, bytes]] = {}
        self._lost = False
        """Whether a server is gone that lists were of."""

    def poke(self) -> None:
        self._poked.set()

    def renew(self, endpoint: Endpoint) -> None:
        """Watch the servers that are there now: those that changed or are new are looked at."""
        before = self.context.endpoint.upstreams
        if before == endpoint.upstreams:
            return
        names = {each.name for each in endpoint.upstreams}
        self._lost = self._lost or any(each.name not in names for each in before)
        self._known = {name: it for name, it in self._known.items() if name in names}
        self.context = msgspec.structs.replace(self.context, endpoint=endpoint)
        self.poke()

    async def begin(self) -> None:
        """Note what counts as known from now on.

        What changes meanwhile may be in it already, or not: then nothing counts as known, and all
        lists as changed. That a server offers something else by now may be found here first: who
        listens already is told of that, too.
        """
        looks, _ = await self._look(passes_on=True)
        if not self._poked.is_set():
            self._known = looks

    async def run(self, tell: Tell) -> None:
        """Tell of changes until it is cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._poked.wait()
            self._poked.clear()
            looks, is_whole = await self._look()
            try:
                lost, self._lost = self._lost, False
                for method in LIST_CHANGES if lost else self._changed(looks):
                    await tell(method)
            except Exception:
                log.warning("mcp: a changed list is not told yet", exc_info=True)
                is_whole = False
            else:
                self._known |= looks
            if not is_whole:
                self._poked.set()
            await asyncio.sleep(pause_s)
            pause_s = FIRST_PAUSE_S if is_whole else min(2 * pause_s, LAST_PAUSE_S)

    def _changed(self, looks: Mapping[str, Mapping[str, bytes]]) -> list[str]:
        return [
            method
            for method in LIST_CHANGES
            if any(
                name not in self._known or self._known[name].get(method) != now.get(method)
                for name, now in looks.items()
            )
        ]

    async def _look(
        self, *, passes_on: bool = False
    ) -> tuple[dict[str, Mapping[str, bytes]], bool]:
        """Return what is shown by server, and whether of all."""
        upstreams = self.context.endpoint.upstreams
        looks = await asyncio.gather(*(self._look_at(each, passes_on) for each in upstreams))
        found = {
            upstream.name: look
            for upstream, look in zip(upstreams, looks, strict=True)
            if look is not None
        }
        return found, len(found) == len(upstreams)

    async def _look_at(self, upstream: Upstream, passes_on: bool) -> Mapping[str, bytes] | None:
        """Return what is shown of a server; None: not now.

        Whatever fails, others are looked at, and this one again.
        """
        try:
            async with self._turns, asyncio.timeout(LOOK_S):
                return await self.context.list_digests(upstream, passes_on=passes_on)
        except Exception as error:
            name = type(error).__name__
            log.warning("mcp: %s: what is shown of it is not known: %s", upstream.name, name)
            return None


class Watches:
    """The watches of one worker."""

    def __init__(self, relay: Relay, guard: Guard) -> None:
        self._relay = relay
        self._open: dict[str, set[Watch]] = {}
        """By org."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._telling = TaskSet()
        relay.handlers[KIND] = self._take
        if guard.catalog is not None:
            guard.catalog.noticed.append(self._noticed)

    async def close(self) -> None:
        await self._telling.wait()

    @asynccontextmanager
    async def of(self, context: ClientContext) -> AsyncIterator[Watch]:
        org_id, watch = context.caller.org_id, Watch(context, self._turns)
        self._open.setdefault(org_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._open[org_id].discard(watch)
            if not self._open[org_id]:
                del self._open[org_id]

    def renew(self, endpoint_of: Callable[[ClientContext], Endpoint]) -> None:
        """Have each listener watch its endpoint as it is now."""
        for watches in self._open.values():
            for watch in watches:
                watch.renew(endpoint_of(watch.context))

    def decided(self, org_id: str | None) -> None:
        """Check the lists again after approvals or rules of an org changed; None: of any org. Items
        that were approved may be new at their server, too."""
        if org_id is not None:
            self._poke(self._open.get(org_id, ()), None)
            return
        for watches in self._open.values():
            for watch in watches:
                watch.poke()

    def _noticed(self, org_id: str, upstream: Upstream) -> None:
        """Check the lists of other listeners: a request has found that this server offers something
        else."""
        self._poke(self._open.get(org_id, ()), upstream.name, but=upstream)
        self._telling.spawn(self._pass_on(org_id, upstream.name))

    async def _pass_on(self, org_id: str, server: str) -> None:
        try:
            await self._relay.tell_all(KIND, org=org_id, server=server, by=self._relay.worker)
        except RedisError as error:
            name = type(error).__name__
            log.warning("mcp: %s: other workers are not told of a change: %s", server, name)

    async def _take(self, payload: Payload) -> None:
        if payload["by"] != self._relay.worker:
            self._poke(self._open.get(payload["org"], ()), payload["server"])

    def _poke(
        self, watches: Iterable[Watch], server: str | None, but: Upstream | None = None
    ) -> None:
        """Wake the listeners of that server, or of all; its offer is requested again, once."""
        others: set[Upstream] = set()
        for watch in watches:
            found = [u for u in watch.context.endpoint.upstreams if server in (None, u.name)]
            if found:
                others.update(found)
                watch.poke()
        for upstream in others - {but}:
            upstream.changed()
