"""Shows /console/fleet: what is served and by what, how full it is, who waits, and which `tollgate
up` has which settings in force. For operators: it is the installation's.

The figures of an engine are its own last word; those of an upstream, and what is served, are of the
worker that answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

import msgspec
from litestar import Response

from billing.queries import ask_all
from engine.protocol import Lane, ReplicaStatus
from gateway.console.tables import Table, TableColumn
from gateway.fleet.router import Route
from gateway.health.component import GOOD, USELESS, replica_component
from gateway.installation.items import HomeState, homes_query, number_query
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest

TONES = {"ok": "ok", "unknown": "plain"}
"""A part that nobody has asked yet is neither good nor bad."""

page = ConsolePage(name="fleet", title="Models and fleet", letter="f", needs="operator:models")


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the page shows it. Figures are None where nobody knows them."""

    name: str
    kind: str
    state: tuple[str, str]
    context: int | None
    running: int
    waiting: int
    kv_used: float | None
    leased: float | None
    cache_hits: float | None
    """The share of the prompts' tokens that the prefix cache had, since the engine's start."""
    preemptions: int | None


class ShownReplica(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    name: str
    state: tuple[str, str]
    since: int | None
    weight: int
    running: int
    waiting: int
    last_error: str | None
    last_error_at: int | None


class ShownLane(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    lane: str
    running: int
    waiting: int
    queue: float | None
    """The part of the queue's bound that is taken; at 1 the next request is refused."""
    tokens: int
    prefill_speed: float | None


def status_of(request: ConsoleRequest, route: Route) -> ReplicaStatus | None:
    engine = request.services.engines.get(route.parent or route.model)
    return engine.status if engine is not None and engine.connected else None


def to_model(route: Route, status: ReplicaStatus | None) -> ShownModel:
    healths = [replica.health() for replica in route.replicas]
    states = [replica_component(route.kind, replica).state for replica in route.replicas]
    useful = sum(state not in USELESS for state in states)
    word, tone = ("down", "err") if not useful else ("serves", "ok")
    if 0 < useful < len(states) or (useful and any(each not in GOOD for each in states)):
        word, tone = f"{useful} of {len(states)} serve", "wait"
    asked = 0 if status is None else status.prefix_cache_query_tokens
    return ShownModel(
        name=route.model,
        kind="adapter" if route.parent else route.kind,
        state=(word, tone),
        context=route.max_model_len,
        running=sum(each.num_running for each in healths),
        waiting=sum(each.num_waiting for each in healths),
        kv_used=None if status is None else status.kv_cache_usage,
        leased=None if status is None else status.num_leased_blocks / max(status.num_blocks, 1),
        cache_hits=status.prefix_cache_hit_tokens / asked if status is not None and asked else None,
        preemptions=None if status is None else status.num_preemptions,
    )


def replicas_of(route: Route) -> Iterator[ShownReplica]:
    for replica in route.replicas:
        found, load = replica_component(route.kind, replica), replica.health()
        tone = TONES.get(found.state, "err" if found.state in USELESS else "wait")
        yield ShownReplica(
            model=route.model,
            name=replica.name,
            state=(found.state, tone),
            since=found.since,
            weight=replica.weight,
            running=load.num_running,
            waiting=load.num_waiting,
            last_error=found.last_error,
            last_error_at=found.last_error_at,
        )


def lanes_of(model: str, status: ReplicaStatus) -> Iterator[ShownLane]:
    for name in get_args(Lane):
        if (lane := status.lanes.get(name)) is None:
            continue
        yield ShownLane(
            model=model,
            lane=name,
            running=lane.num_running,
            waiting=lane.num_waiting,
            queue=lane.num_queued / lane.max_queued if lane.max_queued else None,
            tokens=lane.waiting_tokens,
            prefill_speed=round(lane.prefill_tokens_per_s) or None,
        )


def state_of_home(home: HomeState, number: int) -> tuple[str, str]:
    if home.problem:
        return "refuses them", "err"
    if home.number == number:
        return "in force", "ok"
    return "takes them up", "wait"


def homes_table(found: tuple[HomeState, ...], number: int) -> Table:
    return Table(
        "Settings in force",
        found,
        TableColumn("Home", "home"),
        TableColumn("Stored settings", lambda each: state_of_home(each, number), kind="tag"),
        TableColumn("Number", "number", kind="count"),
        TableColumn("Reason", lambda each: each.problem or None),
        TableColumn("Seen", "seen_at", kind="time"),
    )


MODEL_COLUMNS = (
    TableColumn("Model", "name"),
    TableColumn("By", "kind"),
    TableColumn("State", "state", kind="tag"),
    TableColumn("Running", "running", kind="count"),
    TableColumn("Waiting", "waiting", kind="count"),
    TableColumn("KV in use", "kv_used", kind="bar", hint="Blocks that requests hold, of all."),
    TableColumn("Leased", "leased", kind="percent", hint="Blocks kept for who paid for it."),
    TableColumn("From the cache", "cache_hits", kind="percent",
                hint="Of the prompts' tokens, since the engine's start."),
    TableColumn("Preempted", "preemptions", kind="count", hint="Since the engine's start."),
    TableColumn("Context", "context", kind="count"),
)  # fmt: skip
LANE_COLUMNS = (
    TableColumn("Model", "model"),
    TableColumn("Lane", "lane"),
    TableColumn("Running", "running", kind="count"),
    TableColumn("Waiting", "waiting", kind="count"),
    TableColumn("Queue", "queue", kind="bar", hint="When it is full, the next request is refused."),
    TableColumn("Prompt tokens to compute", "tokens", kind="count"),
    TableColumn("Tokens a second", "prefill_speed", kind="count", hint="Of prompts, recently."),
)
REPLICA_COLUMNS = (
    TableColumn("Replica", "name"),
    TableColumn("Model", "model"),
    TableColumn("State", "state", kind="tag"),
    TableColumn("Since", "since", kind="time"),
    TableColumn("Running", "running", kind="count"),
    TableColumn("Waiting", "waiting", kind="count"),
    TableColumn("Weight", "weight", kind="count", hint="Its share of the requests."),
    TableColumn("Last error", "last_error"),
    TableColumn("At", "last_error_at", kind="time"),
)


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    async with request.system_db.connect() as conn:
        number, homes = await ask_all(conn, number_query(), homes_query())
    health = await request.services.readiness.health()
    routes = sorted(request.services.generation.fleet.routes, key=lambda each: each.model)
    statuses: Mapping[str, ReplicaStatus | None] = {
        each.model: status_of(request, each) for each in routes
    }
    models = [to_model(each, statuses[each.model]) for each in routes]
    lanes = [
        lane
        for route in routes
        if route.parent is None and (status := statuses[route.model]) is not None
        for lane in lanes_of(route.model, status)
    ]
    replicas = [each for route in routes if route.parent is None for each in replicas_of(route)]
    configuration = request.services.configuration
    engines = len({each.model for each in routes if each.kind == "engine" and not each.parent})
    in_use = 0 if configuration is None else len(configuration.engine_addresses)
    return request.render(
        "fleet",
        table=Table("Models", models, *MODEL_COLUMNS),
        lanes=Table("Lanes", lanes, *LANE_COLUMNS),
        replicas=Table("Replicas", replicas, *REPLICA_COLUMNS),
        homes=homes_table(homes, number),
        health=health,
        parts=[each for each in health.components if each.kind in ("spool", "postgres", "redis")],
        leaving=max(in_use - engines, 0),
        tones=TONES,
        down=[each.name for each in models if each.state[1] == "err"],
        running=sum(each.running for each in replicas),
        waiting=sum(each.waiting for each in replicas),
        kv_used=max((each.kv_used for each in models if each.kv_used is not None), default=None),
    )


routes = page.routes
