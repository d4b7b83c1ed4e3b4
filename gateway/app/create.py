"""Wires one worker's application: `create_app()` is the only place where things are wired.

What needs an event loop is opened in the lifespan, in the order of dependence, and closed in the
reverse of it: streams are drained before the spool is shipped, and the spool is shipped before the
pools close.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import redis.asyncio
from litestar import Litestar, Request, Response
from litestar.enums import MediaType, ScopeType
from litestar.exceptions import NotFoundException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import ASGIApp, Receive, Scope, Send
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.shipper import OnBooked, Shipper
from billing.invoices.invoicer import Invoicer
from billing.ledger.spend_totals import ever_used
from billing.spool.spool import Spool
from engine.transport.client import EngineClient
from foundation.tasks import TaskSet
from foundation.trace_context import TracePolicy
from gateway import logs
from gateway.app.application import Application, find_routes, near_path_finder
from gateway.app.connection import LAST_REQUEST_S
from gateway.app.live import LiveConfiguration
from gateway.app.registry_follower import RegistryFollower
from gateway.app.rollout_looks import RolloutLooks
from gateway.app.sealed_rows import start_sealing
from gateway.app.served_models import START_WAIT_S, ServedModels
from gateway.auth.assembly.auth import open_auth
from gateway.auth.errors import AuthError, MissingScope
from gateway.batches.endpoints import LineEndpoint, ask_response, ask_surface, in_anthropic_shape
from gateway.batches.runner import open_batches
from gateway.batches.states import MESSAGES as MESSAGES_PATH
from gateway.bookkeeping.engine_counts import start_daily_agreement
from gateway.bookkeeping.spend_reader import PostgresBooks
from gateway.bookkeeping.sweepers import start_credits, start_superseded, tell_of_booked
from gateway.cache_report.leases import CacheLeases, both, place_of
from gateway.cache_report.report import CacheReport
from gateway.db import POOL_SIZE, ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.files.store import open_files
from gateway.fleet.cells.lent_engine import LentEngineClient
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet
from gateway.health.readiness import Readiness
from gateway.home import Home
from gateway.http_errors.table import (
    RequestTooLarge,
    UnknownPath,
    to_http_error,
    to_responses_error,
)
from gateway.inference.cache_notes import OnCached
from gateway.inference.generate import drain
from gateway.inference.hedge_budget import HedgeBudget
from gateway.inference.request_mover import RequestMover
from gateway.inference.services import GenerationServices
from gateway.inference.settlement import CrashSettlement
from gateway.limits.ceilings import Ceilings
from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.store import CellStore
from gateway.limits.limiter import Limiter
from gateway.limits.refused_caps import RefusedCaps
from gateway.logs import worker_name
from gateway.mcp.call_arguments import CallArguments
from gateway.mcp.service.service import open_mcp, open_tool_loops, own_version
from gateway.net.mail import Mailer, MailServer
from gateway.networks import Networks
from gateway.request_log.answers import NotedAnswer
from gateway.request_log.content_log import ContentLog
from gateway.request_log.live_tail import LiveTail
from gateway.request_log.writer import RequestLog
from gateway.responses.wiring import Responses, open_responses
from gateway.routes.asgi.access_log import AccessLine, AccessLog
from gateway.routes.asgi.cors import Cors
from gateway.routes.asgi.fast_path import FastPath
from gateway.routes.asgi.head import HeadMethod
from gateway.routes.asgi.late_routes import LateRoutes
from gateway.routes.asgi.request_metrics import RequestMetrics
from gateway.routes.asgi.request_rows import recording
from gateway.routes.asgi.response_headers import ResponseHeaders
from gateway.routes.oauth import errors as oauth_errors
from gateway.routes.oauth import protected_resources
from gateway.routes.shared.guards import authenticate
from gateway.routes.shared.idempotency import IdempotencyLayer, claim_key
from gateway.routes.shared.openapi import openapi_config
from gateway.routes.shared.problem import (
    asked_as,
    code_of,
    encode_error,
    with_vendor_status,
)
from gateway.routes.shared.request_state import (
    BY_METRICS_LISTENER,
    CLIENT_LEFT,
    ERROR_CODE,
    OUTCOME,
    REQUEST_ID,
)
from gateway.routes.shared.services import Services
from gateway.secret import Secret
from gateway.settings.file import MailConfig
from gateway.settings.load import Settings, read_secret
from gateway.settings.prices import load_prices
from gateway.telemetry.metrics import Telemetry
from gateway.tenancy.changes import Subscription, announce_suspensions
from gateway.tenancy.idempotency_keys import IdempotencyKeys
from gateway.webhooks.sender import Webhooks, open_webhooks
from gateway.wire.surfaces import MESSAGES, RESPONSES, SURFACES
from gateway.worker.resources import Resources
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 2.0
MAX_REDIS_CONNECTIONS = 64
SHIP_TIMEOUT_S = 10.0
"""At shutdown: what is not in Postgres by then stays in the spool, for whoever adopts it."""
CACHED_SALTS = 65_536
CACHE_SALT = "cache-salt"
OF_METRICS_LISTENER = frozenset({"/metrics", "/health", "/health/live", "/health/ready", "/ping"})
NOT_OF_METRICS_LISTENER = "Here are /metrics, /health, /health/live and /health/ready.\n"


def create_app(
    settings: Settings, *, worker_id: str = "0", metrics: Path | None = None
) -> Application:
    """Return one worker's ASGI application.

    `metrics`: prometheus-client's shared folder, where there is one.
    """
    app = with_routes(settings.max_body_bytes)
    app.state.open = partial(open_services, settings, worker_id=worker_id, metrics=metrics)
    process = worker_name(worker_id)
    app.state.open_access_log = partial(open_access_log, settings, process=process)
    app.state.begin_drain = lambda: None
    app.state.drain_timeout_s = settings.drain_timeout_s
    app.state.public_url = settings.issuer
    app.state.metrics_port = settings.metrics.port
    if settings.root_path:
        app.asgi_handler = behind(settings.root_path, app.asgi_handler)
    if settings.metrics.port is not None:
        app.asgi_handler = with_metrics_apart(app.asgi_handler, settings.metrics.port)
    return app


def behind(root_path: str, app: ASGIApp) -> ASGIApp:
    """Serve an application's routes behind a path, too. `root_path`: `/llm`, say."""
    start, raw_start = f"{root_path}/", f"{root_path}/".encode()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP and scope["path"].startswith(start):
            scope["path"] = scope["path"][len(root_path) :]
            if scope["raw_path"].startswith(raw_start):
                scope["raw_path"] = scope["raw_path"][len(root_path) :]
        await app(scope, receive, send)

    return serve


def with_metrics_apart(app: ASGIApp, port: int) -> ASGIApp:
    """Serve metrics and health alone on the listener that is theirs. `port`: its port, by which a
    request tells that it came that way."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope["server"] if scope["type"] == ScopeType.HTTP else None
        if server is None or server[1] != port:
            await app(scope, receive, send)
        elif scope["path"] in OF_METRICS_LISTENER:
            scope.setdefault("state", {})[BY_METRICS_LISTENER] = True
            await app(scope, receive, send)
        else:
            request: Request[Any, Any, Any] = Request(scope, receive)
            told = Response(NOT_OF_METRICS_LISTENER, status_code=404, media_type=MediaType.TEXT)
            await told.to_asgi_response(None, request)(scope, receive, send)

    return serve


def with_routes(max_body_bytes: int) -> Application:
    """Return the application with its routes and layers; what depends on other settings stands in
    its state."""
    app = Application(
        route_handlers=find_routes(late=False),
        lifespan=[lifespan],
        guards=[authenticate],
        before_request=claim_key,
        exception_handlers={Exception: refuse},
        request_max_body_size=max_body_bytes,
        openapi_config=openapi_config(),
        debug=False,
        logging_config=None,
    )
    others = Cors(IdempotencyLayer(HeadMethod(app.asgi_handler)))
    framework = LateRoutes(others, app.register_late_routes)
    app.asgi_handler = RequestMetrics(ResponseHeaders(FastPath(framework, app)))
    return app


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        services: Services = await app.state.open(stack)
        app.state.services = services
        app.state.access_log = app.state.open_access_log(
            stack, services.telemetry, services.request_log, services.content_log
        )
        note_work(services, app.state.access_log)
        # They end first: one that goes on opens a connection to a store that is closed already.
        for periodic in (
            services.periodic_observation(),
            services.readiness.periodic_probe(),
            services.idempotency_keys.periodic_sweep(),
            services.responses.store.periodic_sweep(),
        ):
            periodic.start()
            stack.push_async_callback(periodic.close)
        app.state.begin_drain = partial(begin_drain, services, app.state.drain_timeout_s)
        yield


def open_access_log(
    settings: Settings,
    stack: AsyncExitStack,
    telemetry: Telemetry,
    request_log: RequestLog,
    content_log: ContentLog | None = None,
    *,
    process: str,
) -> AccessLog:
    put_content = None if content_log is None else content_log.put
    record_row, record_spans, policy = recording(request_log.put, put_content), None, None
    if (traces := settings.traces) is not None:
        from gateway.traces.request_spans import recording_spans  # needs the extra `otel`

        record_spans = stack.enter_context(
            recording_spans(
                traces,
                telemetry,
                process=process,
                with_content=content_log is not None and content_log.keeps_any,
            )
        )
        policy = TracePolicy(
            ratio=traces.ratio,
            client_sampled_per_s=traces.client_sampled_per_s,
            trusts_clients=traces.trust == "clients",
            send_to=traces.send_context_to,
        )

    def on_answer(answer: NotedAnswer, line: AccessLine) -> None:
        record_row(answer, line)
        if record_spans is not None:
            record_spans(answer, line)

    write = logs.write_lines
    made = AccessLog(
        settings.logs, telemetry, write, process=process, on_answer=on_answer, policy=policy
    )
    return stack.enter_context(made.running())


def note_work(services: Services, log: AccessLog) -> None:
    """Let the log hear of what is done for no HTTP request of its own."""
    services.batches.tell(log.note, log.policy)
    services.responses.background.note = log.note


def begin_drain(services: Services, timeout_s: float) -> None:
    """Begin to leave, at SIGTERM: what is still open after `timeout_s` is ended and billed.
    Readiness turns red once no connection brings another request: a probe that is on its way is
    served as all others are, and a worker that gives way to another one makes nobody think that the
    gateway leaves."""
    asyncio.get_running_loop().call_later(LAST_REQUEST_S, services.readiness.begin_drain)
    services.live_tail.leave()
    services.batches.leave()
    services.responses.background.leave()
    if services.mcp is not None:
        services.mcp.begin_drain()
    services.generation.tasks.spawn(drain(services.generation, timeout_s), name="drain")


def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    scope = request.scope
    if scope.get("state", {}).get(OUTCOME) == CLIENT_LEFT:
        return Response(b"", status_code=int(CLIENT_LEFT))  # the body never came; nobody reads this
    if isinstance(error, RequestEntityTooLarge):  # the framework's, which does not say the limit
        error = RequestTooLarge(request.route_handler.resolve_request_max_body_size())
    if isinstance(error, NotFoundException):
        error = UnknownPath(near_path_finder(request.app)(scope["path"]))
    near = error.near if isinstance(error, UnknownPath) else None
    path = asked_as(near or scope["path"], scope["headers"])
    http_error = with_vendor_status(to_http_error(error), path)
    scope.setdefault("state", {})[ERROR_CODE] = code_of(http_error, path)
    headers = http_error.headers
    if isinstance(error, (AuthError, MissingScope)):
        headers = headers | protected_resources.challenged(request, error)
    if oauth_errors.speaks_oauth(scope["path"]) or oauth_errors.asks_for_console(request):
        return oauth_errors.to_response(request, http_error, headers)
    body, media_type = encode_error(http_error, path, scope.get("state", {}).get(REQUEST_ID))
    return Response(body, status_code=http_error.status, headers=headers, media_type=media_type)


async def open_services(
    settings: Settings, stack: AsyncExitStack, *, worker_id: str, metrics: Path | None
) -> Services:
    resources = await open_resources(settings, stack, worker_id=worker_id, metrics=metrics)
    secret, db, system_db = resources.secret, resources.db, resources.system_db
    limiter = await open_limiter(settings, resources)
    settlement = open_settlement(resources, limiter)
    leases = open_cache_leases(settings, resources)
    on_booked = both(both(leases.booked, limiter.counters.book), resources.telemetry.booked)
    on_booked = both(on_booked, partial(tell_of_booked, resources.listener))
    shipper = start_shipper(resources, settlement, on_booked)
    near = settings.egress_to_loopback
    auth = await open_auth(resources, issuer=settings.issuer, allow_loopback=near)
    start_sealing(resources)
    mail_server = to_mail_server(settings.mail)
    webhooks = open_deliveries(settings, resources, mail_server)
    models = await open_models(settings, resources, settlement, leases)
    start_bookkeeping(settings, resources, models)
    follow_registry(settings, resources, models.fleet)
    report = start_cache_report(resources)
    request_log = start_request_log(settings, resources)
    content_log = start_content_log(settings, resources)
    generation = open_generation(settings, resources, models.fleet, limiter, report.note)
    responses = open_responses(settings, resources, generation, request_log)
    files = open_files(settings, resources)
    endpoints = batch_endpoints(generation, responses)
    batches = open_batches(
        settings, resources, generation, files, on_booked, endpoints, request_log, content_log
    )
    stack.push_async_callback(drain, generation, 0)
    services = Services(
        generation=generation,
        telemetry=resources.telemetry,
        readiness=open_readiness(resources, models.fleet, shipper),
        authenticator=auth.authenticator,
        authority=auth.authority,
        idempotency_keys=IdempotencyKeys(db=db, system_db=system_db, secret=secret),
        responses=responses,
        db=db,
        system_db=system_db,
        redis=resources.redis,
        cors_origins=auth.cors_origins,
        listener=resources.listener,
        spool=resources.spool,
        shipper=shipper,
        engines=models.engines,
        drain_marks=models.drain_marks,
        join_tokens=models.join_tokens(Home(settings.home)),
        index=models.index,
        rooms=models.rooms,
        authorization=auth.authorization,
        federation=auth.federation,
        webhooks=webhooks,
        files=files,
        batches=batches,
        mcp=(mcp := await open_mcp(settings, resources, generation, auth)),
        tool_loops=open_tool_loops(settings, mcp),
        asked_arguments=CallArguments(secret),
        cache_report=report,
        request_log=request_log,
        content_log=content_log,
        live_tail=start_live_tail(resources),
        trusted_proxies=Networks.of(settings.trusted_proxies),
        mailer=Mailer(mail_server),
    )
    resources.listener.start()  # all that it wakes is there
    services.configuration = LiveConfiguration(
        settings, resources=resources, services=services, models=models, leases=leases, auth=auth
    )
    return services


def open_cache_leases(settings: Settings, resources: Resources) -> CacheLeases:
    return CacheLeases(
        resources.system_db,
        resources.redis,
        settings.models,
        resources.telemetry.cache_leases_became,
        resources.listener,
    )


def open_readiness(resources: Resources, fleet: Fleet, shipper: Shipper) -> Readiness:
    return Readiness(
        fleet=fleet,
        redis=resources.redis,
        spool=resources.spool,
        db=resources.system_db,
        shipper=shipper,
        listener=resources.listener,
    )


def open_deliveries(
    settings: Settings, resources: Resources, mail_server: MailServer | None
) -> Webhooks:
    return open_webhooks(
        resources.stack,
        resources.secret,
        resources.system_db,
        resources.telemetry,
        allow_loopback=settings.egress_to_loopback,
        mail_server=mail_server,
        public_url=settings.issuer,
        listener=resources.listener,
    )


def to_mail_server(config: MailConfig | None) -> MailServer | None:
    """Add the password to the settings of an SMTP server. Raises: SettingsError."""
    if config is None:
        return None
    variable = config.password_env
    return MailServer(
        host=config.host,
        port=config.port,
        tls=config.tls,
        sender=config.sender,
        user=config.user,
        password=None if variable is None else read_secret(variable, "mail.password_env"),
    )


async def open_resources(
    settings: Settings, stack: AsyncExitStack, *, worker_id: str, metrics: Path | None
) -> Resources:
    assert settings.redis_url is not None
    secret = Secret.load(settings.secret_key_file)
    tasks = TaskSet()
    stack.push_async_callback(tasks.close)
    db = open_pool(settings, stack, ROLE_TENANT)
    system_db = open_pool(settings, stack, ROLE_SYSTEM)
    store = open_redis(settings.redis_url, stack)
    telemetry = Telemetry(
        models=settings.model_names,
        shared_folder=metrics,
        counts_tenants=settings.metrics.tenants,
    )
    telemetry.build_info.labels(own_version()).set(1)
    telemetry.show_objectives(settings.slos, settings.model_names)
    stack.callback(telemetry.close, os.getpid())
    price_book = load_prices(settings)
    folder = Home(settings.home).spool / worker_id
    spool = await Spool.open(folder, policy=settings.spool.sync)
    stack.push_async_callback(spool.shutdown)
    listener = WorkListener(open_pool(settings, stack, ROLE_SYSTEM, size=1))
    stack.push_async_callback(listener.close)
    return Resources(
        stack=stack,
        secret=secret,
        tasks=tasks,
        db=db,
        system_db=system_db,
        redis=store,
        telemetry=telemetry,
        price_book=price_book,
        spool=spool,
        listener=listener,
    )


def batch_endpoints(
    generation: GenerationServices, responses: Responses
) -> dict[str, LineEndpoint]:
    """Return what a line of a batch may ask, by its path."""
    respond = LineEndpoint(
        to_call=partial(ask_response, generation, responses), to_http_error=to_responses_error
    )
    plain = {
        path: LineEndpoint(to_call=partial(ask_surface, generation, surface))
        for path, surface in SURFACES.items()
    }
    ask_messages = partial(ask_surface, generation, MESSAGES)
    messages = LineEndpoint(to_call=ask_messages, encode=in_anthropic_shape)
    return {**plain, RESPONSES: respond, MESSAGES_PATH: messages}


def open_generation(
    settings: Settings, resources: Resources, fleet: Fleet, limiter: Limiter, on_cached: OnCached
) -> GenerationServices:
    return GenerationServices(
        fleet=fleet,
        limiter=limiter,
        spool=resources.spool,
        price_book=resources.price_book,
        tasks=resources.tasks,
        cache_salts=cache_salts(resources.secret.current.derive(CACHE_SALT)),
        stalled_reader_s=settings.stalled_reader_s,
        max_resumes=settings.fleet.max_resumes if settings.fleet.resume else 0,
        drain_timeout_s=settings.fleet.drain_timeout_s,
        hedges=HedgeBudget(settings.fleet.hedge),
        mover=RequestMover(fleet),
        deadlines=settings.deadlines,
        slos=settings.slos,
        on_cached=on_cached,
    )


def open_settlement(resources: Resources, limiter: Limiter) -> CrashSettlement:
    settlement = CrashSettlement(
        db=resources.system_db,
        limiter=limiter,
        tasks=resources.tasks,
        price_book=resources.price_book,
        telemetry=resources.telemetry,
    )
    settlement.recovered(resources.spool.recovered)
    return settlement


def start_cache_report(resources: Resources) -> CacheReport:
    report = CacheReport(resources.system_db)
    report.start()
    resources.stack.push_async_callback(report.close)
    return report


def start_request_log(settings: Settings, resources: Resources) -> RequestLog:
    request_log = RequestLog(
        resources.system_db,
        keep_days=settings.requests.keep_days,
        on_dropped=resources.telemetry.request_rows_dropped.inc,
    )
    request_log.start()
    resources.stack.push_async_callback(request_log.close)
    return request_log


def start_content_log(settings: Settings, resources: Resources) -> ContentLog:
    content_log = ContentLog(
        resources.system_db,
        resources.secret,
        keep_days=settings.requests.days_of_content,
        on_dropped=resources.telemetry.request_rows_dropped.inc,
    )
    content_log.start()
    resources.stack.push_async_callback(content_log.close)
    return content_log


def start_live_tail(resources: Resources) -> LiveTail:
    tail = LiveTail(resources.system_db)
    resources.stack.push_async_callback(tail.close)
    return tail


def start_shipper(
    resources: Resources, settlement: CrashSettlement, on_booked: OnBooked
) -> Shipper:
    shipper = Shipper(
        resources.spool,
        resources.system_db,
        adopt_from=resources.spool.directory.parent,
        on_recovered=settlement.recovered,
        on_left=settlement.left,
        on_booked=on_booked,
    )
    shipper.start()
    resources.stack.push_async_callback(shipper.stop)
    resources.stack.push_async_callback(shipper.drain, SHIP_TIMEOUT_S)
    return shipper


def start_bookkeeping(settings: Settings, resources: Resources, models: ServedModels) -> None:
    stack, system_db = resources.stack, resources.system_db
    start_superseded(resources)
    invoicer = Invoicer(system_db, on_suspension=lambda: announce_suspensions(resources.redis))
    invoicer.start()
    stack.push_async_callback(invoicer.close)
    start_daily_agreement(stack, settings, lambda: models.configured, system_db)


def follow_registry(settings: Settings, resources: Resources, fleet: Fleet) -> None:
    home, looks = Home(settings.home), RolloutLooks(resources.system_db, fleet)
    follower = RegistryFollower(
        resources.system_db, resources.listener, fleet, home, on_rollouts=looks.wake
    )
    for work in (looks, follower):
        work.start()
        resources.stack.push_async_callback(work.close)


async def open_limiter(settings: Settings, resources: Resources) -> Limiter:
    stack, system_db = resources.stack, resources.system_db
    ceilings = Ceilings(system_db, num_gateways=lambda: limiter.num_gateways)
    ceilings.start()
    stack.push_async_callback(ceilings.close)
    refused_caps = RefusedCaps(system_db)
    refused_caps.start()
    stack.push_async_callback(refused_caps.close)
    start_credits(resources)
    books = PostgresBooks(system_db)
    cells = None
    if (cell := settings.cell) is not None:
        heard, on_event = Subscription.of(resources.redis), resources.telemetry.fleet.cell_event
        cells = CellBudgets(cell.name, CellStore(system_db), announcements=heard, on_event=on_event)
    limiter = Limiter(
        resources.redis,
        cells=cells,
        ever_used=partial(ever_used, system_db, resources.spool),
        num_gateways=settings.workers,
        books=books,
        lender=books,
        on_use=ceilings.note,
        on_refusal=refused_caps.note,
        on_refused=resources.telemetry.limit_refused,
        on_slices=resources.telemetry.slices_asked,
    )
    await limiter.start()
    stack.push_async_callback(limiter.close)
    return limiter


async def open_models(
    settings: Settings, resources: Resources, settlement: CrashSettlement, leases: CacheLeases
) -> ServedModels:
    """Open what serves the models; each engine's client connects from now on."""

    def connect(kind: type[EngineClient], name: str, address: str) -> EngineClient:
        return kind(
            address,
            on_orphan=partial(settlement.orphaned, name),
            on_lease=partial(leases.heard, place_of(address)),
            interval_s=settings.stream_interval_s,
        )

    stack, threads = resources.stack, PrepareThreads()
    marks = DrainMarks(Home(settings.home).drain_marks)
    stack.callback(threads.close)
    stack.callback(marks.close)
    index = KvIndex(Home(settings.home).kv_index)
    models = ServedModels(
        *(partial(connect, EngineClient), threads, leases.asked, marks, index),
        fetches=settings.fleet.fetch,
        borrow=partial(connect, LentEngineClient),
    )
    wanted = await models.prepare(settings, wait_s=START_WAIT_S)
    models.swap(wanted)
    leases.watch({place_of(each): client for each, client in models.clients.items()})
    leases.start()
    stack.push_async_callback(leases.close)
    stack.push_async_callback(models.close)
    return models


def open_pool(
    settings: Settings, stack: AsyncExitStack, role: str, *, size: int = POOL_SIZE
) -> AsyncEngine:
    assert settings.database_url is not None
    pool = create_engine(settings.database_url, role=role, pool_size=size)
    stack.push_async_callback(pool.dispose)
    return pool


def open_redis(url: str, stack: AsyncExitStack) -> redis.asyncio.Redis:
    store = connect_redis(url)
    stack.push_async_callback(store.aclose)
    return store


def connect_redis(url: str) -> redis.asyncio.Redis:
    """Open a bounded pool that fails fast: only a caller that knows that a command may be repeated
    repeats it."""
    return redis.asyncio.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        max_connections=MAX_REDIS_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )


def cache_salts(secret: bytes) -> Callable[[str], str]:
    """Return a function from an org's id to 128 bits that only this installation can compute."""

    @lru_cache(CACHED_SALTS)
    def salt(org_id: str) -> str:
        return hmac.digest(secret, org_id.encode(), "sha256").hex()[:32]

    return salt
