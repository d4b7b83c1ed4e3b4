"""The services of one worker process, as `app` wires them: data for the routes to reach."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.shipper import Shipper
from billing.spool.spool import Spool
from engine.transport.client import Engine
from foundation.periodic import Periodic
from gateway.auth.assembly.auth import Federation
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.cors_origins import CorsOrigins
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.authorization import Authorization
from gateway.batches.runner import BatchRunner
from gateway.cache_report.report import CacheReport
from gateway.files.store import FileStore
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.joining.tokens import JoinTokens
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.planner.view import PlannerView
from gateway.fleet.waiting_room import WaitingRoom
from gateway.health.readiness import Readiness
from gateway.home import Home
from gateway.inference.services import GenerationServices
from gateway.installation.merge import Merger
from gateway.mcp.call_arguments import CallArguments
from gateway.mcp.service.service import McpService
from gateway.net.mail import Mailer
from gateway.networks import Networks
from gateway.request_log.content_log import ContentLog
from gateway.request_log.live_tail import LiveTail
from gateway.request_log.writer import RequestLog
from gateway.responses.wiring import Responses
from gateway.settings.live import LiveSettings
from gateway.settings.load import Settings
from gateway.telemetry.metrics import Telemetry
from gateway.tenancy.idempotency_keys import IdempotencyKeys
from gateway.tools.loop import ToolLoops
from gateway.webhooks.sender import Webhooks
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

OBSERVE_INTERVAL_S = 1.0
"""A scrape asks one worker and hears of all: what the others say is at most so old."""


class Configuration(Protocol):
    """The settings in force in a worker."""

    settings: Settings
    merger: Merger
    on_engine_released: Callable[[], None]
    """Called when nothing here can be asked of an engine any more that was replaced."""

    async def apply(self, live: LiveSettings) -> None:
        """Take other settings up, all of them or none. Raises what says why not."""
        ...

    @property
    def engine_addresses(self) -> Collection[str]:
        """The engines that something here may still be asked of."""
        ...


class Services(msgspec.Struct, kw_only=True):
    """Other settings replace `mcp` and `tool_loops`; a request takes them once."""

    generation: GenerationServices
    telemetry: Telemetry
    readiness: Readiness
    authenticator: Authenticator
    idempotency_keys: IdempotencyKeys
    responses: Responses
    authority: Authority
    db: AsyncEngine
    """A pool for the tenants' role: it shows only rows of the org that `gateway.db.tenant` named.
    """
    system_db: AsyncEngine
    """Shows all orgs: for what must look before it knows the tenant, and what serves them all."""
    redis: Redis
    """For what is announced to all workers (`tenancy.changes`)."""
    cors_origins: CorsOrigins
    listener: WorkListener
    spool: Spool
    shipper: Shipper
    engines: Mapping[str, Mapping[str, Engine]]
    """By model name and by the replica's name, as of now."""
    drain_marks: DrainMarks
    join_tokens: JoinTokens
    index: KvIndex | None = None
    """Says which engine of a model has what cached."""
    rooms: Mapping[str, Sequence[WaitingRoom]] = {}
    """The waiting rooms of upstreams, by model name, as of now."""
    authorization: Authorization
    """The pages of the authorization server, and clients."""
    federation: Federation
    """Issuers and clients that others run."""
    webhooks: Webhooks
    files: FileStore
    batches: BatchRunner
    cache_report: CacheReport
    request_log: RequestLog
    content_log: ContentLog
    live_tail: LiveTail
    asked_arguments: CallArguments
    mcp: McpService | None = None
    """None: no servers are configured."""
    tool_loops: ToolLoops | None = None
    """None: there is no server whose tools a model could call."""
    trusted_proxies: Networks = Networks()
    mailer: Mailer = msgspec.field(default_factory=lambda: Mailer(None))
    configuration: Configuration | None = None
    """None: it takes up no other settings."""
    started_at: int = msgspec.field(default_factory=lambda: int(time.time()))
    """Unix seconds."""

    def observe(self) -> None:
        """Bring this worker's gauges, and what its readiness has seen, up to date."""
        self.readiness.observe()
        components = self.readiness.components()
        self.telemetry.components((each.kind, each.name, each.state) for each in components)
        resting = [(each.kind, each.name) for each in components if each.state == "resting"]
        if self.readiness.free_bytes is not None:
            self.telemetry.spool_free_bytes.set(self.readiness.free_bytes)
        self.telemetry.spool_quarantined.set(self.readiness.num_quarantined)
        for model, engines in self.engines.items():
            for replica, engine in engines.items():
                if engine.connected:
                    self.telemetry.engine_status(model, replica, engine.status)
        for model, rooms in self.rooms.items():
            self.telemetry.waiting_rooms(model, rooms)
        has_choice = any(len(engines) > 1 for engines in self.engines.values())
        index = self.index.state() if has_choice and self.index is not None else None
        self.telemetry.engine_gauges.show_index(index)
        self.telemetry.fleet.pools.show_pools(
            {
                route.model: route.pool_states()
                for route in self.generation.fleet.routes
                if route.kind == "engine" and route.parent is None
            }
        )
        view = self.planner_view()
        self.telemetry.fleet.pools.show_plans(() if view is None else view.models)
        shares = self.generation.fleet.versions.shares
        self.telemetry.fleet.show_rollouts(
            {each.rollout.model: each.rollout.percent / 100 for each in shares}
        )
        replicas = [(model, each) for model, engines in self.engines.items() for each in engines]
        self.telemetry.zero_gone(engines=replicas, rooms=self.rooms)
        servers, upstreams = ((), []) if self.mcp is None else self.mcp.health_by_server()
        self.telemetry.mcp_health(servers, upstreams)
        self.telemetry.breakers(
            resting=resting,
            batch_models=self.batches.breakers.open_models(),
            mcp_servers=(server for server, state in upstreams if state != "closed"),
        )
        self.telemetry.open_calls.set(len(self.generation.open_calls))
        self.telemetry.tasks.set(len(asyncio.all_tasks()))
        self.telemetry.spool_backlog.set(self.spool.backlog)
        self.telemetry.spool_lag.set(self.spool.lag_s(time.time()))
        self.telemetry.spool_unsynced.set(self.spool.unsynced_s)
        self.telemetry.spool_written(self.spool.counts)
        self.telemetry.usage_conflicts.set(self.shipper.alarms.conflicts)
        self.telemetry.usage_refused.set(self.shipper.alarms.refused)

    def planner_view(self) -> PlannerView | None:
        """Return what the planner of this home decided last; None: it has nothing to decide."""
        if self.configuration is None:
            return None
        plans = any(each.asked is not None for each in self.generation.fleet.routes)
        if not plans and not self.configuration.settings.fleet.planner.devices:
            return None
        return PlannerView.read(Home(self.configuration.settings.home).planner_view)

    def periodic_observation(self) -> Periodic:
        """Return the repeated observation, which runs in every worker."""

        async def observe() -> None:
            self.observe()
            await self.readiness.has_seen_redis()

        return Periodic(
            "observe", lambda: OBSERVE_INTERVAL_S, observe, log=log, failure="not observed"
        )
