"""GET /v1/models and /v1/models/{model}: what this gateway serves to who asks."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromPath

from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.routes.access import needs, services
from gateway.routes.operations import describes
from gateway.wire.openai import Model, ModelList

OWNER = "tollgate"


@get(
    "/v1/models",
    opt=needs(SCOPE_INFERENCE),
    tags=["Models"],
    summary="List the models",
    operation_class=describes(answer=ModelList),
)
async def list_models(request: Request[Principal, Any, Any]) -> ModelList:
    found = services(request)
    data = [
        Model(id=route.model, created=found.started_at, owned_by=OWNER)
        for route in found.desk.fleet.routes
        if request.user.may_use(route.model)
    ]
    return ModelList(data=data)


@get(
    "/v1/models/{model:path}",
    opt=needs(SCOPE_INFERENCE),
    tags=["Models"],
    summary="One model",
    operation_class=describes(answer=Model),
)
async def retrieve_model(request: Request[Principal, Any, Any], model: FromPath[str]) -> Model:
    found = services(request)
    route = found.desk.fleet.resolve(model.removeprefix("/"), request.user)
    return Model(id=route.model, created=found.started_at, owned_by=OWNER)


routes = [list_models, retrieve_model]
