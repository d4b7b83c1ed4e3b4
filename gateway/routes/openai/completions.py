"""POST /v1/completions: text behind plain prompts."""

from __future__ import annotations

from litestar.types import ASGIApp

from gateway.principal import SCOPE_INFERENCE
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs
from gateway.routes.shared.generation import HEADERS, REFUSALS, start_generation
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.operations import ErrorEnvelope, describes
from gateway.wire.openai.completions import CompletionRequest
from gateway.wire.openai.to_completions import Completion
from gateway.wire.surfaces import COMPLETIONS

ANSWERS = {JSON: Completion, EVENT_STREAM: str}


@HotRoute(
    "/v1/completions",
    http_method="POST",
    opt=needs(SCOPE_INFERENCE),
    status_code=200,
    tags=["Completions"],
    summary="Complete texts, streamed or whole",
    operation_class=describes(
        body=CompletionRequest,
        answer=Completion,
        headers=HEADERS,
        said={200: ANSWERS, **{status: {JSON: ErrorEnvelope} for status in REFUSALS}},
    ),
)
async def create_completion(request: AuthenticatedRequest) -> ASGIApp:
    return await start_generation(request, COMPLETIONS)


routes = [create_completion]
