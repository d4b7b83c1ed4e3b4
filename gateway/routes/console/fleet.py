"""Shows /console/fleet: what is served and by what, how full it is, who waits, where cached tokens
come from, which version of each model runs where, and which `tollgate up` has which settings in
force. For operators: it is the installation's.

The figures of an engine are its own last word; those of an upstream, and what is served, are of the
worker that answers; versions are what each home reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import msgspec
import sqlalchemy as sa
from litestar import Response

from billing.queries import ask_all
from engine.protocol import Lane, ReplicaStatus
from gateway.console.rollouts import Rollout, changes_of_models_query, rollouts_of
from gateway.console.tables import Table, TableColumn
from gateway.fleet.router import Route
from gateway.health.component import GOOD, USELESS, replica_component, since_of
from gateway.installation.items import HomeState, homes_query, number_query
from gateway.registry.tables import pins
from gateway.routes.admin.installation.fleet import (
    FleetReplica,
    hit_rate_of,
    predicted_ttft_s,
    prefill_speed_of,
    prompt_tokens_of,
    replicas_of,
    state_of,
)
from gateway.routes.console.audit import who
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest

STATE_TONES = {"serving": "ok", "vacant": "plain"}
"""Those of replicas that are neither drained nor away."""
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
    preemptions: int | None


class ShownReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, with what `tollgate fleet status` says of it. None: nobody knows."""

    model: str
    name: str
    role: str | None
    state: tuple[str, str]
    since: int | None
    weight: int
    running: int
    waiting: int
    kv_used: float | None
    hit_rate: float | None
    prefill_speed: float | None
    ttft_ms: float | None
    host: str | None
    last_error: str | None
    last_error_at: int | None


class ShownLane(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    lane: str
    running: int
    waiting: int
    queue: float | None
    """The part of the queue's bound that is taken; at 1 the next request is refused."""
    tokens: int
    prefill_speed: float | None


def statuses_of(request: ConsoleRequest, route: Route) -> dict[str, ReplicaStatus]:
    """Return what each engine of a model said last, by its replica; of those that are there."""
    engines = request.services.engines.get(route.parent or route.model, {})
    return {name: engine.status for name, engine in engines.items() if engine.connected}


def to_model(route: Route, statuses: Mapping[str, ReplicaStatus]) -> ShownModel:
    healths = [replica.health() for replica in route.replicas]
    states = [replica_component(route.kind, replica).state for replica in route.replicas]
    useful = sum(state not in USELESS for state in states)
    word, tone = ("down", "err") if not useful else ("serves", "ok")
    if route.is_asleep:
        word, tone = "asleep", "plain"
    elif 0 < useful < len(states) or (useful and any(each not in GOOD for each in states)):
        word, tone = f"{useful} of {len(states)} serve", "wait"
    return ShownModel(
        name=route.model,
        kind="adapter" if route.parent else route.kind,
        state=(word, tone),
        context=route.max_model_len,
        running=sum(each.num_running for each in healths),
        waiting=sum(each.num_waiting for each in healths),
        kv_used=max((each.kv_cache_usage for each in statuses.values()), default=None),
        preemptions=sum(each.num_preemptions for each in statuses.values()) if statuses else None,
    )


def to_replica(each: FleetReplica) -> ShownReplica:
    found, load, status = each.health, each.replica.health(), each.status
    word = state_of(found.state, load)
    tone = STATE_TONES.get(word, "err" if found.state in USELESS else "wait")
    ttft_s = None if status is None else predicted_ttft_s(each.replica)
    speed = None if status is None else prefill_speed_of(status)
    return ShownReplica(
        model=each.route.model,
        name=each.replica.name,
        role=each.route.role_of(each.replica),
        state=(word, tone),
        since=since_of(found, load),
        weight=each.replica.weight,
        running=load.num_running,
        waiting=load.num_waiting,
        kv_used=None if status is None else status.kv_cache_usage,
        hit_rate=None if status is None else hit_rate_of(status),
        prefill_speed=None if speed is None else round(speed),
        ttft_ms=None if ttft_s is None else 1000 * ttft_s,
        host=each.host,
        last_error=found.last_error,
        last_error_at=found.last_error_at,
    )


def lanes_of(replica: str, status: ReplicaStatus) -> Iterator[ShownLane]:
    for name in get_args(Lane):
        if (lane := status.lanes.get(name)) is None:
            continue
        yield ShownLane(
            replica=replica,
            lane=name,
            running=lane.num_running,
            waiting=lane.num_waiting,
            queue=lane.num_queued / lane.max_queued if lane.max_queued else None,
            tokens=lane.waiting_tokens,
            prefill_speed=round(lane.prefill_tokens_per_s) or None,
        )


class CacheTier(msgspec.Struct, frozen=True, kw_only=True):
    """One place from which cached tokens come. None: nobody here knows."""

    name: str
    """The name of the engine's replica, or of the model that upstreams serve."""
    tier: str
    size: int | None = None
    """Tokens, as the next ones."""
    used: float | None = None
    """The share that running requests hold."""
    cached: int | None = None
    leased: int | None = None
    hits: int
    asked: int

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.asked if self.asked else None


def engine_tiers(replica: str, status: ReplicaStatus) -> Iterator[CacheTier]:
    tokens, asked = prompt_tokens_of(status), status.prefix_cache_query_tokens
    yield CacheTier(
        name=replica,
        tier="KV memory of the engine",
        size=status.num_blocks * status.block_size,
        used=status.kv_cache_usage,
        cached=status.num_cached_blocks * status.block_size,
        leased=status.num_leased_blocks * status.block_size,
        hits=tokens.pool,
        asked=asked,
    )
    if status.max_host_blocks:
        yield CacheTier(
            name=replica,
            tier="host memory of the engine",
            size=status.max_host_blocks * status.block_size,
            cached=status.num_host_blocks * status.block_size,
            hits=tokens.host,
            asked=asked,
        )
    if status.max_tier_blocks:
        yield CacheTier(
            name=replica,
            tier="disk of the engine",
            size=status.max_tier_blocks * status.block_size,
            cached=status.num_tier_blocks * status.block_size,
            hits=tokens.disk,
            asked=asked,
        )
    if tokens.fetched:
        yield CacheTier(
            name=replica, tier="caches of other engines", hits=tokens.fetched, asked=asked
        )


def upstream_tier(model: str, counts: Mapping[str, int]) -> CacheTier:
    """`counts`: the tokens of a model by kind."""
    hits = counts.get("cache_read", 0)
    asked = hits + counts.get("uncached", 0) + counts.get("cache_write", 0)
    return CacheTier(name=model, tier="cache of the provider", hits=hits, asked=asked)


async def read_tiers(
    request: ConsoleRequest,
    routes: Sequence[Route],
    statuses: Mapping[str, Mapping[str, ReplicaStatus]],
) -> list[CacheTier]:
    """Return where cached tokens come from: of each engine that answers, and of each model that
    upstreams serve."""
    found = []
    is_upstream = any(each.kind == "upstream" for each in routes)
    telemetry = request.services.telemetry
    counts = await asyncio.to_thread(telemetry.token_counts) if is_upstream else {}
    for route in routes:
        if route.kind == "upstream":
            found.append(upstream_tier(route.model, counts.get(route.model, {})))
        elif route.parent is None:
            for name, each in statuses[route.model].items():
                found += engine_tiers(name, each)
    return found


def state_of_home(home: HomeState, number: int) -> tuple[str, str]:
    if home.problem:
        return "refuses them", "err"
    if home.number == number and not home.is_changing:
        return "in force", "ok"
    return "takes them up", "wait"


def homes_table(found: tuple[HomeState, ...], number: int) -> Table:
    return Table(
        "Settings in force",
        found,
        TableColumn("Home", "home"),
        TableColumn("Release", lambda each: each.running.release or None),
        TableColumn("Settings", lambda each: state_of_home(each, number), kind="tag"),
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
    TableColumn("KV in use", "kv_used", kind="bar",
                hint="Blocks that requests hold, of all; of the fullest replica."),
    TableColumn("Preempted", "preemptions", kind="count", hint="Since the engines' start."),
    TableColumn("Context", "context", kind="count"),
)  # fmt: skip
LANE_COLUMNS = (
    TableColumn("Replica", "replica"),
    TableColumn("Lane", "lane"),
    TableColumn("Running", "running", kind="count"),
    TableColumn("Waiting", "waiting", kind="count"),
    TableColumn("Queue", "queue", kind="bar", hint="When it is full, the next request is refused."),
    TableColumn("Prompt tokens to compute", "tokens", kind="count"),
    TableColumn("Tokens a second", "prefill_speed", kind="count", hint="Of prompts, recently."),
)
TIER_COLUMNS = (
    TableColumn("Replica or model", "name"),
    TableColumn("Tier", "tier"),
    TableColumn("Size", "size", kind="count", hint="Tokens."),
    TableColumn("In use", "used", kind="bar", hint="By running requests."),
    TableColumn("Cached", "cached", kind="count",
                hint="Tokens that a later prompt may find, also while requests use them."),
    TableColumn("Leased", "leased", kind="count", hint="Tokens kept for who paid for it."),
    TableColumn("Hits", "hits", kind="count",
                hint="Tokens of prompts that it had: since the engine's start, or the gateway's."),
    TableColumn("Hit rate", "hit_rate", kind="percent", hint="Of all tokens of prompts."),
)  # fmt: skip


def replicas_table(found: Sequence[ShownReplica]) -> Table:
    """Return the replicas; what is said of none is left out of the page, not of the CSV."""
    is_told = any(each.last_error for each in found)
    is_weighted = any(each.weight != 1 for each in found)
    has_roles = any(each.role == "prefill" for each in found)
    return Table(
        "Replicas",
        found,
        TableColumn("Replica", "name"),
        TableColumn("Model", "model", in_page=False),
        TableColumn("Role", "role", in_page=has_roles,
                    hint="Prefill: computes prompts for those that decode."),
        TableColumn("State", "state", kind="tag"),
        TableColumn("Since", "since", kind="time"),
        TableColumn("Running", "running", kind="count"),
        TableColumn("Waiting", "waiting", kind="count"),
        TableColumn("KV in use", "kv_used", kind="bar", hint="Blocks that requests hold, of all."),
        TableColumn("Hit rate", "hit_rate", kind="percent",
                    hint="Cached tokens of all tokens of prompts, since the engine's start."),
        TableColumn("Tokens a second", "prefill_speed", kind="count", hint="Of prompts, lately."),
        TableColumn("First token", "ttft_ms", kind="ms",
                    hint="As predicted of an interactive prompt of 1,024 tokens, none cached."),
        TableColumn("Machine", "host", in_page=any(each.host for each in found),
                    hint="From which its engine joined."),
        TableColumn("Weight", "weight", kind="count", in_page=is_weighted,
                    hint="Its share of the requests."),
        TableColumn("Last error", "last_error", in_page=is_told),
        TableColumn("At", "last_error_at", kind="time", in_page=is_told),
    )  # fmt: skip


PIN_COLUMNS = (
    TableColumn("Model", "model"),
    TableColumn("Version", "version", kind="figure"),
    TableColumn("Pinned for", "scope"),
    TableColumn("Whose", lambda row: row.scope_id or None, kind="id"),
    TableColumn("Since", "created_at", kind="time"),
)
MOST_PINS = 200
SELECT_PINS = sa.select(pins).order_by(pins.c.created_at.desc()).limit(MOST_PINS)


PLAN_COLUMNS = (
    TableColumn("Model", "model"),
    TableColumn("Range", lambda each: f"{each.least}..{each.most}"),
    TableColumn("Run", "running", kind="count"),
    TableColumn("Start", "starting", kind="count"),
    TableColumn("Wanted", "wanted", kind="count"),
    TableColumn("Why", lambda each: each.problem or each.reasons[0].text),
    TableColumn("Requests a second", lambda each: f"{each.rate:.2f}"),
    TableColumn("Forecast", lambda each: f"{each.expected_rate:.2f}",
                hint="For when an engine that is started now would serve."),
)  # fmt: skip


def rollouts_table(request: ConsoleRequest, found: Sequence[Rollout]) -> Table:
    def entry_of(rollout: Rollout) -> str | None:
        is_theirs = rollout.change is not None and request.can("admin:audit")
        return f"/console/audit/{rollout.change.id}" if rollout.change and is_theirs else None

    def changer(rollout: Rollout) -> str | None:
        return None if rollout.change is None else who(rollout.change)

    return Table(
        "Rollouts",
        found,
        TableColumn("Model", lambda each: each.version.model),
        TableColumn("Version", lambda each: each.version.version, kind="code",
                    hint="A digest of its settings: where they are the same, so is it."),
        TableColumn("State", "state", kind="tag"),
        TableColumn("Since", lambda each: each.version.since, kind="time"),
        TableColumn("Runs at", lambda each: each.version.place, detail=lambda each: each.home),
        TableColumn("Home", "home", in_page=False),
        TableColumn("Weights", lambda each: each.version.weights or None),
        TableColumn("Changed by", changer, link=entry_of,
                    hint="The last change of the model before that, in the audit log."),
        TableColumn("Reason", lambda each: each.version.problem or None)
        if any(each.version.problem for each in found) else None,
    )  # fmt: skip


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    async with request.system_db.connect() as conn:
        number, homes, changes = await ask_all(
            conn, number_query(), homes_query(), changes_of_models_query(request.org_id)
        )
        pinned = (await conn.execute(SELECT_PINS)).all()
    health = await request.services.readiness.health()
    routes = sorted(request.services.generation.fleet.routes, key=lambda each: each.model)
    statuses = {each.model: statuses_of(request, each) for each in routes}
    models = [to_model(each, statuses[each.model]) for each in routes]
    lanes = [
        lane
        for route in routes
        if route.parent is None
        for name, status in statuses[route.model].items()
        for lane in lanes_of(name, status)
    ]
    replicas = [to_replica(each) for _, each in sorted(replicas_of(request.services).items())]
    tiers, plan = await read_tiers(request, routes, statuses), request.services.planner_view()
    return request.render(
        "fleet",
        table=Table("Models", models, *MODEL_COLUMNS),
        tables={
            "lanes": Table("Lanes", lanes, *LANE_COLUMNS),
            "tiers": Table("Cache tiers", tiers, *TIER_COLUMNS),
            "replicas": replicas_table(replicas),
            "plans": Table("Plans", () if plan is None else plan.models, *PLAN_COLUMNS),
            "pins": Table("Pins", pinned, *PIN_COLUMNS),
            "rollouts": rollouts_table(request, rollouts_of(homes, changes)),
            "homes": homes_table(homes, number),
        },
        health=health,
        parts=[each for each in health.components if each.kind in ("spool", "postgres", "redis")],
        tones=TONES,
        down=[each.name for each in models if each.state[1] == "err"],
        running=sum(each.running for each in replicas),
        waiting=sum(each.waiting for each in replicas),
        kv_used=max((each.kv_used for each in models if each.kv_used is not None), default=None),
    )


routes = page.routes
