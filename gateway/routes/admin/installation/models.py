"""/v1/admin/models: what this worker serves, and how its replicas are. For operators: replicas and
their load are the installation's.

`/v1/models` is OpenAI's view, for whoever may call them.
"""

from __future__ import annotations

import msgspec

from billing.cache_contracts import FLOORS, ContractName
from gateway.fleet.replica import Replica
from gateway.fleet.router import Route
from gateway.health.component import USELESS, State, replica_component
from gateway.routes.shared.access import needs
from gateway.routes.shared.pages import page_of
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import NotFound
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """`available`: false where no request would be served, as far as is known: an engine is away,
    or an upstream was unreachable or refused this gateway when it was last asked."""

    name: str
    available: bool
    state: State
    reachable: bool | None
    authorised: bool | None
    """Whether an upstream accepts this gateway's key. Null: it is not known, or it wants none."""
    since: int | None
    """When it came into this state (Unix seconds)."""
    last_error: str | None
    last_error_at: int | None
    num_running: int
    num_waiting: int
    weight: int


class CacheContractView(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt tokens that the engine reused and that are billed as read from the cache: from
    `min_tokens` on, in steps of `step`. `explicit`: and up to a breakpoint."""

    name: str
    min_tokens: int
    step: int


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: `engine` for one of our own, `upstream` for somebody else's."""

    object: str = "model"
    id: str
    kind: str
    available: bool
    """True if one of its replicas is available."""
    replicas: list[ReplicaView]
    cache_contract: CacheContractView | None
    """Null: an upstream counts by itself."""


def to_contract(name: ContractName | None) -> CacheContractView | None:
    if name is None:
        return None
    floor = FLOORS[name]
    return CacheContractView(name=name, min_tokens=floor.min_tokens, step=floor.step)


def to_view(route: Route) -> ModelView:
    replicas = [to_replica(route, replica) for replica in route.replicas]
    return view_of(
        ModelView,
        route,
        id=route.model,
        available=any(each.available for each in replicas),
        replicas=replicas,
        cache_contract=to_contract(route.cache_contract),
    )


def to_replica(route: Route, replica: Replica) -> ReplicaView:
    load, found = replica.health(), replica_component(route.kind, replica)
    return view_of(
        ReplicaView,
        found,
        available=found.state not in USELESS,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        weight=replica.weight,
    )


models = AdminResource[Route](
    path="/v1/admin/models",
    tag="Models",
    read=needs("operator:models"),
    view=ModelView,
    show=to_view,
    checks_ids=False,
)


def served(request: AdminRequest) -> dict[str, Route]:
    return {route.model: route for route in request.services.generation.fleet.routes}


@models.page("What is served, by name", PageQuery)
async def list_(request: AdminRequest, query: PageQuery) -> tuple[list[Route], bool]:
    found = served(request)
    names, more = page_of(found, query)
    return [found[name] for name in names], more


@models.get("One model and its replicas", path=models.path + "/{model:path}")
async def retrieve(request: AdminRequest) -> Route:
    name = request.id.removeprefix("/")
    found = served(request).get(name)
    if found is None:
        raise NotFound("model", f"no model {name!r}")
    return found


routes = [list_, retrieve]
