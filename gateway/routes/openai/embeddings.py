"""POST /v1/embeddings."""

from __future__ import annotations

from litestar.types import ASGIApp

from gateway.principal import SCOPE_INFERENCE
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs
from gateway.routes.shared.generation import HEADERS, REFUSALS, start_generation
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, describes
from gateway.wire.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
)
from gateway.wire.surfaces import EMBEDDINGS


@HotRoute(
    "/v1/embeddings",
    http_method="POST",
    opt=needs(SCOPE_INFERENCE),
    status_code=200,
    tags=["Embeddings"],
    summary="Create embeddings of texts or of token ids",
    operation_class=describes(
        body=EmbeddingRequest,
        answer=EmbeddingList,
        headers=HEADERS,
        said={status: {JSON: ErrorEnvelope} for status in REFUSALS},
    ),
)
async def create_embeddings(request: AuthenticatedRequest) -> ASGIApp:
    return await start_generation(request, EMBEDDINGS)


routes = [create_embeddings]
