"""GET /v1/models and /v1/models/{model}: what this gateway serves to who asks, in OpenAI's shape,
and in Anthropic's to who names the version of that."""

from __future__ import annotations

from litestar.params import FromPath

from gateway.fleet.router import Route
from gateway.principal import SCOPE_INFERENCE
from gateway.routes.anthropic.messages import VERSION_NAMED, names_version
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.anthropic.models import (
    AnthropicModel,
    AnthropicModelPage,
    ModelsQuery,
    to_model,
    to_page,
)
from gateway.wire.openai.chat import Model, ModelList
from gateway.wire.organization.usage import parse_query

OWNER = "tollgate"
models = RouteGroup(tag="Models", opt=needs(SCOPE_INFERENCE), headers=(VERSION_NAMED,))


@models.get(
    "/v1/models", "List the models", query=ModelsQuery, answer=(ModelList, AnthropicModelPage)
)
async def list_models(request: AuthenticatedRequest) -> ModelList | AnthropicModelPage:
    found = services(request)
    served = [each for each in found.generation.fleet.routes if request.user.may_use(each.model)]
    if names_version(request):
        names = [each.model for each in served]
        return to_page(names, found.started_at, parse_query(request.url.query, ModelsQuery))
    return ModelList(data=[to_openai_model(each, found.started_at) for each in served])


@models.get("/v1/models/{model:path}", "One model", answer=(Model, AnthropicModel))
async def retrieve_model(
    request: AuthenticatedRequest, model: FromPath[str]
) -> Model | AnthropicModel:
    found = services(request)
    route = found.generation.fleet.resolve(model.removeprefix("/"), request.user)
    if names_version(request):
        return to_model(route.model, found.started_at)
    return to_openai_model(route, found.started_at)


def to_openai_model(route: Route, created: int) -> Model:
    return Model(
        id=route.model,
        created=created,
        owned_by=OWNER,
        root=route.model,
        parent=route.parent,
        max_model_len=route.max_model_len,
    )


routes = [list_models, retrieve_model]
