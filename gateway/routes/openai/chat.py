"""POST /v1/chat/completions."""

from __future__ import annotations

from litestar.types import ASGIApp

from gateway.principal import SCOPE_INFERENCE
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs, services
from gateway.routes.shared.generation import HEADERS, REFUSALS, parse_request, start_generation
from gateway.routes.shared.idempotent_replies import reply_once
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.operations import ErrorEnvelope, describes
from gateway.routes.shared.reply import Reply
from gateway.tools.chat import names_servers, to_loop
from gateway.tools.loop import start_loop
from gateway.wire.openai.chat import ChatCompletionRequest
from gateway.wire.openai.chat_answer import ChatCompletion
from gateway.wire.surfaces import CHAT

ANSWERS = {JSON: ChatCompletion, EVENT_STREAM: str}


@HotRoute(
    "/v1/chat/completions",
    http_method="POST",
    opt=needs(SCOPE_INFERENCE),
    status_code=200,
    tags=["Chat"],
    summary="Create a chat completion, streamed or whole",
    operation_class=describes(
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        headers=HEADERS,
        said={200: ANSWERS, **{status: {JSON: ErrorEnvelope} for status in REFUSALS}},
    ),
)
async def chat_completions(request: AuthenticatedRequest) -> ASGIApp:
    context = await parse_request(request)
    if not names_servers(context.body):
        return await start_generation(request, CHAT, context)
    found = services(request)
    loop = to_loop(found.generation, found.tool_loops, context)

    def begin() -> Reply:
        return Reply(start_loop(found.generation, loop), stream=loop.call.request.stream)

    return await reply_once(request, context, begin)


routes = [chat_completions]
