"""/v1/admin/fleet: each replica of each model, how full it is and how fast, and which of them get
nothing new. For operators: replicas are the installation's.

The figures of an engine are its own last word; what is known of an upstream is of the worker that
answers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol import EngineRole, Lane, ReplicaStatus
from gateway.audit.log import record
from gateway.fleet.joining.joined_engines import present_in
from gateway.fleet.predicted_time import UNTOLD, Prompt
from gateway.fleet.replica import Replica, ReplicaHealth, is_viewed
from gateway.fleet.router import Route
from gateway.health.component import GOOD, Component, State, since_of
from gateway.routes.shared.access import needs
from gateway.routes.shared.pages import page_of
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.routes.shared.services import Services
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.wire.shared.page_query import PageQuery

PATH = "/v1/admin/fleet"
ONE = f"{PATH}/{{replica:path}}"
SAMPLE = Prompt.of(1024, 0)
"""The prompt by whose predicted time replicas are compared."""


class FleetLane(msgspec.Struct, frozen=True, kw_only=True):
    """A lane of an engine. `waiting_tokens`: of prompts, still to compute."""

    num_running: int
    num_waiting: int
    waiting_tokens: int


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an engine's prompts since its start, by where they came from: the KV cache,
    host memory, disk, other engines, or the model that computed them."""

    pool: int
    host: int
    disk: int
    fetched: int
    computed: int


class LearntCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that an engine has learnt of its steps: of each step, and in it of each sequence
    that decodes and of each token of a prompt."""

    step_s: float
    decode_s: float
    prompt_token_s: float


class FleetReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: serving, or what keeps it from that: draining, drained (nothing runs there now),
    vacant (nobody has joined there), unreachable, unauthorised, failing, resting. Null: an upstream
    does not say it."""

    object: Literal["fleet_replica"] = "fleet_replica"
    id: str
    model: str
    kind: str
    role: EngineRole | None
    """The part of requests that its engine does: prefill (it computes prompts for the others),
    decode, or both. Null: it is an upstream."""
    state: str
    since: int | None
    """When it came into this state (Unix seconds)."""
    engine_id: str | None
    """Another one for each process of an engine."""
    num_running: int
    num_waiting: int
    kv_used: float | None
    """The part of the KV blocks that requests hold."""
    hit_rate: float | None
    """The part of the prompts' tokens that its cache had, since its start."""
    prefill_tokens_per_s: float | None
    """The speed at which it computed prompts lately, in its fastest lane; null: it has computed
    none."""
    lanes: dict[Lane, FleetLane] | None
    prompt_tokens: PromptTokens | None
    generated_tokens: int | None
    """Since its start."""
    costs: LearntCosts | None
    """Null: it has learnt none yet."""
    predicted_ttft_s: float | None
    """The predicted time to the first token of an interactive prompt of 1,024 tokens, none of them
    cached, if it came now."""
    max_model_len: int | None
    host: str | None
    """The machine from which its engine joined; null: it was started elsewise, or is away."""


class ReplicaPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`drained`: it ends what it runs and gets nothing new, until it is not drained any more or
    `tollgate up` starts again."""

    drained: bool


class FleetReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, how it is, and what its engine said last; None: it is away, or no engine of
    ours. `host`: the machine from which it joined."""

    route: Route
    replica: Replica
    health: Component
    status: ReplicaStatus | None
    host: str | None = None


def to_view(each: FleetReplica) -> FleetReplicaView:
    load, status = each.replica.health(), each.status
    return FleetReplicaView(
        id=each.replica.name,
        model=each.route.model,
        kind=each.route.kind,
        role=each.route.role_of(each.replica),
        state=state_of(each.health.state, load),
        since=since_of(each.health, load),
        engine_id=None if status is None else status.engine_id,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_used=None if status is None else status.kv_cache_usage,
        hit_rate=None if status is None else hit_rate_of(status),
        prefill_tokens_per_s=None if status is None else prefill_speed_of(status),
        lanes=None if status is None else lanes_of(status),
        prompt_tokens=None if status is None else prompt_tokens_of(status),
        generated_tokens=None if status is None else status.generated_tokens,
        costs=None if status is None else costs_of(status),
        predicted_ttft_s=None if status is None else predicted_ttft_s(each.replica),
        max_model_len=None if status is None else status.max_model_len,
        host=each.host,
    )


def state_of(state: State, load: ReplicaHealth) -> str:
    if load.is_drained and load.available:
        return "draining" if load.num_running or load.num_waiting else "drained"
    return state if state == "vacant" or state not in GOOD else "serving"


def hit_rate_of(status: ReplicaStatus) -> float | None:
    asked = status.prefix_cache_query_tokens
    return status.prefix_cache_hit_tokens / asked if asked else None


def lanes_of(status: ReplicaStatus) -> dict[Lane, FleetLane]:
    return {
        name: FleetLane(
            num_running=lane.num_running,
            num_waiting=lane.num_waiting,
            waiting_tokens=lane.waiting_tokens,
        )
        for name, lane in status.lanes.items()
    }


def prompt_tokens_of(status: ReplicaStatus) -> PromptTokens:
    hits, elsewhere = status.prefix_cache_hit_tokens, status.host_hit_tokens
    elsewhere += status.tier_hit_tokens + status.fetched_tokens
    return PromptTokens(
        pool=hits - elsewhere,
        host=status.host_hit_tokens,
        disk=status.tier_hit_tokens,
        fetched=status.fetched_tokens,
        computed=status.prefix_cache_query_tokens - hits,
    )


def costs_of(status: ReplicaStatus) -> LearntCosts | None:
    costs = status.costs
    if costs == UNTOLD:
        return None
    return LearntCosts(
        step_s=costs.step_s, decode_s=costs.decode_s, prompt_token_s=costs.prompt_token_s
    )


def predicted_ttft_s(replica: Replica) -> float | None:
    """Return what is predicted of SAMPLE; None: nobody knows."""
    if not is_viewed(replica) or not replica.view.price.is_learnt:
        return None
    return replica.view.seconds_to_first_token(SAMPLE, "interactive")


def prefill_speed_of(status: ReplicaStatus) -> float | None:
    return max((each.prefill_tokens_per_s for each in status.lanes.values()), default=0.0) or None


fleet = AdminResource[FleetReplica](
    path=PATH,
    tag="Fleet",
    read=needs("operator:models"),
    change=needs("operator:models"),
    view=FleetReplicaView,
    show=to_view,
    unsteady=(
        *("since", "engine_id", "num_running", "num_waiting", "kv_used", "hit_rate"),
        *("prefill_tokens_per_s", "max_model_len", "host", "lanes", "prompt_tokens"),
        *("generated_tokens", "costs", "predicted_ttft_s"),
    ),
    checks_ids=False,
)


def replicas_of(services: Services) -> dict[str, FleetReplica]:
    """Return all replicas by their names; an adapter has those of its model."""
    found, parts = {}, {each.name: each for each in services.readiness.components()}
    joined = present_in(services.join_tokens.folder)
    for route in services.generation.fleet.routes:
        engines = services.engines.get(route.model, {})
        for replica in route.replicas if route.parent is None and not route.is_asleep else ():
            engine = engines.get(replica.name)
            status = engine.status if engine is not None and engine.connected else None
            found[replica.name] = FleetReplica(
                route=route,
                replica=replica,
                health=parts[replica.name],
                status=status,
                host=joined[replica.name].host if status and replica.name in joined else None,
            )
    return found


@fleet.page("The replicas of all models, by name", PageQuery)
async def list_fleet(request: AdminRequest, query: PageQuery) -> tuple[list[FleetReplica], bool]:
    found = replicas_of(request.services)
    names, more = page_of(found, query)
    return [found[name] for name in names], more


def replica_of(request: AdminRequest) -> FleetReplica:
    """Raises: NotFound."""
    name = request.id.removeprefix("/")
    found = replicas_of(request.services).get(name)
    if found is None:
        raise NotFound("replica", f"no replica {name!r}")
    return found


@fleet.get("One replica", path=ONE)
async def retrieve_replica(request: AdminRequest) -> FleetReplica:
    return replica_of(request)


@fleet.route(
    "PATCH",
    ONE,
    "Send a replica nothing new, or send to it again",
    body=ReplicaPatch,
    conditional=True,
)
async def update_replica(request: AdminRequest, patch: ReplicaPatch) -> FleetReplica:
    found = replica_of(request)
    request.check(found)
    if patch.drained:
        check_drainable(found)
    async with request.transaction() as conn:
        await record(
            conn,
            org_id=request.org_id,
            actor=request.actor,
            action="replica.drained" if patch.drained else "replica.undrained",
            target=found.replica.name,
            before={"drained": found.replica.health().is_drained},
            after={"drained": patch.drained},
        )
    if patch.drained:
        request.services.drain_marks.mark(number_of(found.replica))
    elif found.replica.health().is_drained:
        request.services.drain_marks.remove(number_of(found.replica))
    return found


def check_drainable(found: FleetReplica) -> None:
    """Raises: InvalidField."""
    if found.route.kind != "engine":
        raise InvalidField("drained", "an upstream is not drained; take it out of its model")
    others = (each.health() for each in found.route.replicas if each is not found.replica)
    if all(each.is_drained or not each.available for each in others):
        raise InvalidField("drained", f"no other replica of {found.route.model} takes requests")


def number_of(replica: Replica) -> int:
    """Return the number of an engine's process, with which its name ends where its model has
    several; of one that another cell lends, its place's."""
    return int(replica.name.rpartition("/")[2].rpartition(":")[2])


routes = [list_fleet, retrieve_replica, update_replica]
