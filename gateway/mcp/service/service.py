"""Serves the MCP bridge in this gateway: translates who calls, and hands the bridge what it needs.
Servers are dialled at checked addresses."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from billing.money import Pico
from gateway.audit.log import Actor
from gateway.inference.services import GenerationServices
from gateway.principal import Principal
from gateway.settings.file import WrittenMcpServer
from gateway.settings.load import Settings
from gateway.tenancy.errors import NotFound
from gateway.tools.loop import ToolLoops
from gateway.tools.toolbox import Toolbox
from gateway.worker.resources import Resources

if TYPE_CHECKING:
    from gateway.auth.assembly.auth import Auth
    from gateway.mcp.admin.credentials_admin import UpstreamVault
    from gateway.mcp.admin.pins_admin import PinsAdmin
    from gateway.mcp.calls import RedisCalls
    from gateway.mcp.metered import Callers
    from gateway.mcp.models.own_models import OwnModels
    from gateway.mcp.records import AuditRecords
    from mcp_bridge.caller import Caller
    from mcp_bridge.routing.pruning import Embedder, Pruner
    from mcp_bridge.server.allowed_origins import AllowedOrigins
    from mcp_bridge.server.bridge import Bridge
    from mcp_bridge.trust.approvals import Approvals
    from mcp_bridge.trust.meaning import MeaningScan
    from mcp_bridge.trust.trust import Trust
    from mcp_bridge.upstream.circuit_breaker import UpstreamHealth
    from mcp_bridge.upstream.upstream import Sampler, ServerConfig, TransportKind

log = logging.getLogger(__name__)

STATE_PURPOSE = "mcp-request-state"
NAME = "tollgate"


class McpService:
    """The MCP bridge of one worker. `vault`: what servers are shown. `pins`: what is approved of
    them."""

    def __init__(
        self,
        bridge: Bridge,
        allowed: AllowedOrigins,
        callers: Callers,
        guard: Trust,
        vault: UpstreamVault,
        pins: PinsAdmin,
        approvals_of: Callable[[Principal], Approvals],
        price_of: Callable[[Principal, str], Pico],
        own: OwnModels,
        records: AuditRecords,
        memory: RedisCalls,
    ) -> None:
        from mcp_bridge.server.http import HttpEndpoint

        self.vault, self.pins = vault, pins
        self._bridge, self._allowed, self._callers = bridge, allowed, callers
        self._once, self._approvals_of = guard.ports.memory.once, approvals_of
        self._price_of = price_of
        self._own, self._records, self._memory = own, records, memory
        self._door = HttpEndpoint(bridge)

    @property
    def toolbox(self) -> Toolbox:
        from gateway.tools.mcp_toolbox import BridgeToolbox

        info = {"name": NAME, "version": own_version()}
        return BridgeToolbox(
            self._bridge,
            info,
            self.caller_of,
            self._once,
            self._approvals_of,
            self._price_of,
        )

    def caller_of(self, principal: Principal) -> Caller:
        """Note a request's principal and return its caller: the principal rules what it may do and
        spend."""
        return self._callers.note(to_caller(principal), principal)

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Return what puts the servers of other settings in the place of these, at once. Raises:
        SettingsError, BridgeError; then nothing has changed."""
        from mcp_bridge.server.bridge import check_servers

        servers = check_servers(to_config(each) for each in settings.mcp.servers)
        warn_of_drift(each for each in servers if each.name not in self._bridge.servers)
        swap_vault = self.vault.prepare(settings)
        sampler = open_sampler(settings, self._own, self._records)
        pruner, meaning = open_pruner(settings, self._own), open_meaning_scan(settings, self._own)

        def swap() -> None:
            self._memory.taints = any(server.taints for server in servers)
            swap_vault()
            self._bridge.replace(servers, sampler=sampler, pruner=pruner)
            self.pins.replace(servers, meaning)

        return swap

    def health(self, org_id: str) -> list[UpstreamHealth]:
        """Return the health of what this worker asks for the tenant, by server and user."""
        return self._bridge.health(org_id)

    def health_by_server(self) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        """Return the servers, and the server and state of each upstream."""
        return self._bridge.servers, [(it.upstream, it.state) for it in self._bridge.health()]

    def begin_drain(self) -> None:
        self._bridge.begin_drain()

    async def serve(
        self,
        principal: Principal,
        namespace: str | None,
        pages: Collection[str],
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer one HTTP request. `pages`: the origins that may call in this org's name."""
        await self._door.serve(
            self.caller_of(principal), namespace, self._allowed, pages, scope, receive, send
        )


def to_caller(principal: Principal) -> Caller:
    from mcp_bridge.caller import Caller

    return Caller(
        org_id=principal.org_id,
        project_id=principal.project_id,
        subject=principal.user_id or principal.service_account_id or principal.key_id,
        client=principal.client_id or principal.key_id,
        user_id=principal.user_id,
        keeps_nothing=principal.zero_retention,
    )


def to_actor(principal: Principal) -> Actor:
    """Return the actor for the audit log where there is no HTTP request."""
    return Actor(kind=principal.actor_kind, id=principal.key_id, on_behalf_of=principal.acts_for)


async def open_mcp(
    settings: Settings, resources: Resources, generation: GenerationServices, auth: Auth
) -> McpService | None:
    """Open the bridge; None: there is no server."""
    if not settings.mcp.servers:
        return None
    service = await open_service(settings, resources, generation, auth)
    service.prepare(settings)()
    return service


async def open_service(
    settings: Settings, resources: Resources, generation: GenerationServices, auth: Auth
) -> McpService:
    """Open a bridge without servers, which `McpService.prepare` brings. `auth`: its keys sign who
    calls."""
    stack, secret = resources.stack, resources.secret
    db, redis, telemetry = resources.db, resources.redis, resources.telemetry
    from gateway.mcp.admin.credentials_admin import open_vault
    from gateway.mcp.admin.pins_admin import PinsAdmin
    from gateway.mcp.call_arguments import CallArguments
    from gateway.mcp.calls import RedisCalls
    from gateway.mcp.metered import Callers, CallMeter
    from gateway.mcp.models.own_models import OwnModels
    from gateway.mcp.service.wiring import (
        open_approvals,
        open_approvals_count,
        open_changed_offers,
        open_feed,
        open_records,
        open_trust,
        tell_of,
    )
    from gateway.mcp.upstreams import open_transports
    from mcp_bridge.server.allowed_origins import AllowedOrigins
    from mcp_bridge.server.bridge import Bridge

    bare = msgspec.structs.replace(settings.mcp, servers=[])
    settings = msgspec.structs.replace(settings, mcp=bare)
    vault = await open_vault(settings, stack, secret, db, redis, auth.authority.keys)
    transports = stack.enter_context(open_transports(settings, vault.shown))
    callers = Callers()
    meter = CallMeter(
        callers,
        limiter=generation.limiter,
        spool=generation.spool,
        price_book=generation.price_book,
        tasks=generation.tasks,
        on_call=telemetry.mcp_called,
    )
    records = await open_records(stack, db, telemetry.mcp_guard_found)
    await open_approvals_count(stack, resources.system_db, telemetry)
    feed = await open_feed(stack, redis)
    shown = CallArguments(secret)
    memory = RedisCalls(redis)
    guard = await open_trust(
        *(stack, db, feed, meter, records),
        memory=memory,
        shown=shown,
        on_finding=telemetry.mcp_guard_found,
    )
    info = {"name": NAME, "version": own_version()}
    own = OwnModels(generation, telemetry, callers)
    keys = [key.derive(STATE_PURPOSE) for key in secret.keys]
    bridge = Bridge((), redis, keys, info=info, guard=guard, transports=transports)
    await bridge.start()
    stack.push_async_callback(bridge.close)
    tell_of(feed, bridge.watches)
    changed = await open_changed_offers(stack, redis, guard)
    pins = PinsAdmin((), transports, info, db, redis, feed, compared=changed.note)

    def approvals_of(principal: Principal) -> Approvals:
        return open_approvals(db, to_actor(principal))

    allowed = AllowedOrigins(public_url=settings.issuer)
    rest = (vault, pins, approvals_of, meter.price_of, own, records, memory)
    return McpService(bridge, allowed, callers, guard, *rest)


def open_sampler(settings: Settings, own: OwnModels, records: AuditRecords) -> Sampler | None:
    """Open the sampler; None: no server is answered by a model of ours."""
    written = {each.name: each.sampling for each in settings.mcp.servers}
    asked = {name: each for name, each in written.items() if each.by == "engine"}
    if not asked:
        return None
    from gateway.mcp.models.sampling import ModelSampler

    return ModelSampler(own, records, asked)


def open_pruner(settings: Settings, own: OwnModels) -> Pruner:
    from mcp_bridge.routing.pruning import Pruner

    return Pruner(settings.mcp.max_catalogue_tokens, open_embedder(settings, own))


def open_embedder(settings: Settings, own: OwnModels) -> Embedder | None:
    """Open the embedder; None: tools are found by their words."""
    if settings.mcp.search_model is None:
        return None
    from gateway.mcp.models.embedding import ModelEmbedder

    return ModelEmbedder(own, settings.mcp.search_model)


def open_meaning_scan(settings: Settings, own: OwnModels) -> MeaningScan | None:
    """Open what compares offers by meaning; None: they are scanned by their words."""
    if settings.mcp.scan_model is None:
        return None
    from gateway.inference.house_embedding import HouseEmbedding
    from gateway.mcp.models.embedding import ScanEmbedder
    from mcp_bridge.trust.meaning import MeaningScan

    embedding = HouseEmbedding(own.services, settings.mcp.scan_model)
    return MeaningScan(ScanEmbedder(embedding, own.telemetry.mcp_scan_texts))


def configured(service: McpService | None) -> McpService:
    """Return the service. Raises: NotFound, if there are no servers."""
    if service is None:
        raise NotFound("server", "no MCP server is configured")
    return service


def open_tool_loops(settings: Settings, service: McpService | None) -> ToolLoops | None:
    """Open the tool loops; None: there is no server to ask."""
    if service is None:
        return None
    return ToolLoops(toolbox=service.toolbox, bounds=settings.mcp.loop)


def warn_of_drift(servers: Iterable[ServerConfig]) -> None:
    """Warn once, at the start, of commands that may run something else tomorrow without anybody's
    approval."""
    from mcp_bridge.upstream.stdio.package_refs import unpinned

    for server in servers:
        if server.launch is not None:
            for how in unpinned(server.launch.command, server.launch.args):
                log.warning("mcp: %s is not pinned: %s", server.name, how)


def to_config(server: WrittenMcpServer) -> ServerConfig:
    from gateway.settings.mcp_servers import to_audience, to_launch
    from mcp_bridge.upstream.upstream import ServerConfig

    launch = None if server.command is None else to_launch(server)
    return ServerConfig(
        name=server.name,
        url=server.url or "",
        namespace=server.namespace,
        audience=to_audience(server),
        trust=server.trust,
        taints=server.taints,
        recheck_s=server.recheck_s,
        era=server.era,
        network=server.network,
        credential=server.credential,
        transport=transport_of(server),
        launch=launch,
        document=server.openapi or "",
        query_credentials=tuple(server.query_credentials),
        sampling=server.sampling.by,
        max_samples=server.sampling.max_per_call,
        fingerprint=fingerprint_of(server),
    )


def fingerprint_of(server: WrittenMcpServer) -> str:
    """Return what tells connections of a server from those of another configuration of it. Who may
    call it, and what is thought of it, makes no difference to a connection."""
    beside = {"orgs", "projects", "namespace", "trust", "taints", "recheck_s", "issuer_hosts"}
    fields = {k: v for k, v in msgspec.to_builtins(server).items() if k not in beside}
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:16]


def transport_of(server: WrittenMcpServer) -> TransportKind:
    if server.openapi is not None:
        return "openapi"
    return server.transport if server.command is None else "stdio"


def own_version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "0"
