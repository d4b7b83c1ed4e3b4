"""/v1/admin/models: what this worker serves, and how its replicas are. For operators: replicas and
their load are the installation's.

`/v1/models` is OpenAI's view, for whoever may call them.
"""

from __future__ import annotations

import msgspec
from litestar import Response, get
from litestar.params import FromPath

from billing.cache_contracts import FLOORS, ContractName
from gateway.fleet.router import Route
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, page_of, to_listing
from gateway.tenancy.errors import NotFound
from gateway.wire.organization.usage import parse_query

SCOPE = "operator:models"
TAGS = ["Models"]


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    available: bool
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
    """Some replica is."""
    replicas: list[ReplicaView]
    cache_contract: CacheContractView | None
    """Null: an upstream counts by itself."""


def to_contract(name: ContractName | None) -> CacheContractView | None:
    if name is None:
        return None
    floor = FLOORS[name]
    return CacheContractView(name=name, min_tokens=floor.min_tokens, step=floor.step)


def to_view(route: Route) -> ModelView:
    healths = [(replica.health(), replica.weight) for replica in route.replicas]
    replicas = [
        ReplicaView(
            name=health.name,
            available=health.available,
            num_running=health.num_running,
            num_waiting=health.num_waiting,
            weight=weight,
        )
        for health, weight in healths
    ]
    return ModelView(
        id=route.model,
        kind=route.kind,
        available=any(each.available for each in replicas),
        replicas=replicas,
        cache_contract=to_contract(route.cache_contract),
    )


@get(
    "/v1/admin/models",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="What is served, by name",
    operation_class=describes(query=PageQuery, answer=Listing[ModelView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, PageQuery)
    routes_of = {route.model: route for route in services(request).generation.fleet.routes}
    found = [to_view(routes_of[name]) for name in page_of(routes_of, query)]
    return answer(request, to_listing(found, query))


@get(
    "/v1/admin/models/{model:path}",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="One model and its replicas",
    operation_class=describes(answer=ModelView),
)
async def retrieve(request: AuthenticatedRequest, model: FromPath[str]) -> Response[bytes]:
    name = model.removeprefix("/")
    for route in services(request).generation.fleet.routes:
        if route.model == name:
            return answer(request, to_view(route))
    raise NotFound("model", f"no model {name!r}")


routes = [list_, retrieve]
