"""The bridge: puts many MCP servers behind one endpoint, for many tenants.

Knows no billing, no Litestar and no gateway: who calls is a `Caller`, found out by others. A server
has an `Upstream` for each tenant; those that nobody asked for a while are closed.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.http1 import Resolver
from foundation.retirement import Retirement
from foundation.tasks import SharedTasks, TaskSet
from mcp_bridge.errors import BridgeError
from mcp_bridge.names import checked_label
from mcp_bridge.protocol.continuation import Sealer
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.guard import Guard
from mcp_bridge.routing.pruning import Pruner
from mcp_bridge.routing.sessions import Sessions
from mcp_bridge.routing.shared_streams import SharedStreams
from mcp_bridge.server.legacy import LegacyProtocol
from mcp_bridge.server.list_watch import Watches
from mcp_bridge.server.modern import ModernProtocol
from mcp_bridge.upstream.circuit_breaker import UpstreamHealth
from mcp_bridge.upstream.credentials import UpstreamOwner
from mcp_bridge.upstream.transports.factory import Transports, upstream_owner
from mcp_bridge.upstream.upstream import Sampler, ServerConfig, Upstream
from mcp_bridge.worker_relay import Payload, Relay

log = logging.getLogger(__name__)

MAX_UPSTREAMS = 1024  # of all tenants, per worker
MAX_SERVERS = 64
CHANGED = "offer_changed"
"""Tells other workers that a server says that its offer changed."""
KEEPS_NAMES = "identity"
"""The namespace whose only server keeps its names."""
NAMESPACE = re.compile(r"[a-z0-9](?:-?[a-z0-9]){0,31}")


class BadServer(BridgeError):
    """A configured server cannot be used; the text names the field."""

    code = "bad_server"


class Bridge:
    """The bridge of one worker.

    `keys`: for what clients bring back, the newest first. `transports`: how servers are reached;
    None: over HTTP, at the addresses that `resolve` finds. `guard`: what is shown of what servers
    offer, and which calls go out; None: all of it. `sampler`: writes for servers with `sampling`
    "engine". `pruner`: which catalogues are searched; None: none is.
    """

    def __init__(
        self,
        servers: Iterable[ServerConfig],
        redis: Redis,
        keys: Sequence[bytes],
        *,
        info: dict[str, Any],
        guard: Guard | None = None,
        transports: Transports | None = None,
        resolve: Resolver | None = None,
        sampler: Sampler | None = None,
        pruner: Pruner | None = None,
    ) -> None:
        self._pruner = pruner
        self._servers, self._sampler = check_servers(servers), sampler
        if transports is None:
            transports = Transports(resolver_of=None if resolve is None else lambda _: resolve)
        self._transports = transports
        self.info, self._guard = info, guard or Guard()
        self._upstreams: OrderedDict[tuple[UpstreamOwner, str], Upstream] = OrderedDict()
        self._closing = TaskSet()
        self._retirement = Retirement()
        self.relay = Relay(redis)
        self.relay.handlers[CHANGED] = self._take_change
        self._telling: SharedTasks[tuple[str, str], None] = SharedTasks("mcp changed offer")
        self._streams = SharedStreams(redis, self.relay)
        self.sessions = Sessions(redis, self._streams)
        transports.share(redis, self.relay, self._noticed)
        self.watches = Watches(self.relay, self._guard)
        sealer, told = Sealer(keys), (info, self._guard, self.watches)
        self.modern = ModernProtocol(self.sessions, self.relay, sealer, *told)
        self.legacy = LegacyProtocol(self.sessions, self.relay, *told)

    async def start(self) -> None:
        await self.relay.start()
        self.modern.start()

    def begin_drain(self) -> None:
        """End the streams that wait for changes, so that their clients open them elsewhere; calls
        go on."""
        self.legacy.begin_drain()
        self.modern.begin_drain()

    async def close(self) -> None:
        """Close everything; what is under way ends by name."""
        await self.legacy.close()
        await self.modern.close()
        await self.watches.close()
        await self._telling.wait()
        await self._streams.close()
        await self._transports.close()
        await self.relay.close()
        for upstream in self._upstreams.values():
            await upstream.close()
        await self._closing.wait()
        await self._retirement.close()

    def endpoint(
        self,
        org_id: str,
        namespace: str | None = None,
        user_id: str | None = None,
        *,
        project_id: str = "",
        prunes: bool = False,
    ) -> Endpoint | None:
        """Return an endpoint; None: there is no such namespace.

        Without one: all servers. Those that are there for others alone are none. `user_id`: who
        asks, for servers that are shown a user's own credential. `prunes`: a catalogue that costs
        too much is searched, not listed.
        """
        theirs = (each for each in self._servers if each.audience.has(org_id, project_id))
        found = [each for each in theirs if namespace in (None, each.namespace)]
        if not found and namespace is not None:
            return None
        keeps_names = len(found) == 1 and found[0].namespace == KEEPS_NAMES
        return Endpoint(
            key=namespace or "",
            upstreams=tuple(self._upstream(org_id, user_id, each) for each in found),
            keeps_names=keeps_names,
            pruner=self._pruner if prunes else None,
        )

    def replace(
        self,
        servers: Iterable[ServerConfig],
        *,
        sampler: Sampler | None = None,
        pruner: Pruner | None = None,
    ) -> None:
        """Have these servers from now on, without an await. One that changed or is gone ends what
        it does, and is closed then; who listens is told of lists that changed. Raises: BadServer,
        NameRefused; then nothing has changed."""
        self._servers = check_servers(servers)
        self._sampler, self._pruner = sampler, pruner
        configs = {each.name: each for each in self._servers}
        for key, upstream in list(self._upstreams.items()):
            if configs.get(upstream.name) == upstream.config:
                upstream.sampler = sampler
                continue
            del self._upstreams[key]
            self._transports.forget(upstream.name)
            self._retirement.add(upstream, upstream.transport.close)
        self.watches.renew(self._renewed)

    def _renewed(self, context: ClientContext) -> Endpoint:
        """Return the endpoint of a client that listens, as it is now."""
        caller, before = context.caller, context.endpoint
        found = self.endpoint(
            caller.org_id,
            before.key or None,
            caller.user_id,
            project_id=caller.project_id,
            prunes=before.pruner is not None,
        )
        return found or msgspec.structs.replace(before, upstreams=(), keeps_names=False)

    @property
    def servers(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(each.name for each in self._servers)

    def health(self, org_id: str | None = None) -> list[UpstreamHealth]:
        """Return the health of what this process asks, each for a tenant or one of its users.

        `org_id`: of that one alone.
        """
        return [
            upstream.breaker.health()
            for (owner, _), upstream in self._upstreams.items()
            if org_id in (None, owner.org_id)
        ]

    def _noticed(self, org_id: str, server: str) -> None:
        """Check a server's offer before its next call, in all workers and whoever calls: it says
        that it changed."""
        self._changed(org_id, server)
        self._telling.start((org_id, server), partial(self._pass_on, org_id, server))

    def _changed(self, org_id: str, server: str) -> None:
        for (owner, name), upstream in self._upstreams.items():
            if (owner.org_id, name) == (org_id, server):
                upstream.changed()

    async def _pass_on(self, org_id: str, server: str) -> None:
        try:
            await self.relay.tell_all(CHANGED, org=org_id, server=server, by=self.relay.worker)
        except RedisError as error:
            name = type(error).__name__
            log.warning("mcp: %s: other workers are not told of a change: %s", server, name)

    async def _take_change(self, payload: Payload) -> None:
        if payload["by"] != self.relay.worker:
            self._changed(payload["org"], payload["server"])

    def _upstream(self, org_id: str, user_id: str | None, config: ServerConfig) -> Upstream:
        owner = upstream_owner(config, org_id, user_id)
        key = (owner, config.name)
        upstream = self._upstreams.get(key)
        if upstream is None:
            transport = self._transports.open(config, owner)
            upstream = self._upstreams[key] = Upstream(
                config,
                self.info,
                transport,
                self._sampler,
                partial(self._noticed, org_id, config.name),
            )
            while len(self._upstreams) > MAX_UPSTREAMS:
                self._closing.spawn(self._upstreams.popitem(last=False)[1].close())
        self._upstreams.move_to_end(key)
        return upstream


def check_servers(servers: Iterable[ServerConfig]) -> tuple[ServerConfig, ...]:
    """Raises: BadServer, NameRefused."""
    found = tuple(servers)
    if len(found) > MAX_SERVERS:
        raise BadServer(f"servers: more than {MAX_SERVERS}")
    names = [each.name for each in found]
    for each in found:
        checked_label(each.name)
        if names.count(each.name) > 1:
            raise BadServer(f"name: {each.name!r} stands there twice")
        if each.transport == "stdio":
            if each.launch is None:
                raise BadServer(f"launch: {each.name!r}: a command is wanted")
            each.launch.check()
        elif not each.url.startswith(("http://", "https://")):
            raise BadServer(f"url: {each.name!r}: an http or https URL is wanted")
        if (each.transport == "openapi") != bool(each.document):
            raise BadServer(f"document: {each.name!r}: is of transport 'openapi', which wants one")
        if each.namespace is not None and NAMESPACE.fullmatch(each.namespace) is None:
            raise BadServer(f"namespace: {each.namespace!r}: letters, digits and single hyphens")
    return found
