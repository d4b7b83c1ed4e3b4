"""POST /v1/chat/completions, /v1/completions (text behind plain prompts) and /v1/embeddings; and
/invocations, which is each of them, as the body is one's: SageMaker's path, which vLLM serves."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.types import ASGIApp
from msgspec import UNSET, UnsetType

from gateway.inference.calls import RequestContext, read_context
from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs, services
from gateway.routes.shared.generation import HEADERS, REFUSALS, parse_request, start_generation
from gateway.routes.shared.idempotency import reply_once
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.routes.shared.reply import Reply
from gateway.tools.chat import names_servers, to_loop
from gateway.tools.loop import LoopCall, start_loop
from gateway.wire.openai.chat import ChatCompletionRequest
from gateway.wire.openai.chat_answer import ChatCompletion
from gateway.wire.openai.completions import CompletionRequest
from gateway.wire.openai.embeddings import EmbeddingList, EmbeddingRequest
from gateway.wire.openai.to_completions import Completion
from gateway.wire.shared.refusals import decode
from gateway.wire.surfaces import CHAT, COMPLETIONS, EMBEDDINGS

chat, completions, embeddings, invocations = (
    RouteGroup(tag=tag, opt=needs(SCOPE_INFERENCE), headers=HEADERS)
    for tag in ("Chat", "Completions", "Embeddings", "Invocations")
)
SAID: dict[int, dict[str, Any]] = {status: {JSON: ErrorEnvelope} for status in REFUSALS}


@chat.post(
    "/v1/chat/completions",
    "Create a chat completion, streamed or whole",
    body=ChatCompletionRequest,
    answer=ChatCompletion,
    said={200: {JSON: ChatCompletion, EVENT_STREAM: str}, **SAID},
    handler=HotRoute,
)
async def chat_completions(request: AuthenticatedRequest) -> ASGIApp:
    return await answer_chat(request, await parse_request(request))


async def answer_chat(request: AuthenticatedRequest, context: RequestContext) -> ASGIApp:
    if not names_servers(context.body):
        return await start_generation(request, CHAT, context)
    found, sent = services(request), context

    def read(body: bytes) -> LoopCall:
        asked = msgspec.structs.replace(sent, body=body)
        return to_loop(found.generation, found.tool_loops, asked)

    context, loop = await read_context(sent, read)
    if context.ignored:
        call = msgspec.structs.replace(loop.call, ignored=context.ignored)
        loop = msgspec.structs.replace(loop, call=call)

    def begin() -> Reply:
        return Reply(start_loop(found.generation, loop), stream=loop.call.request.stream)

    return await reply_once(request, context, begin)


@completions.post(
    "/v1/completions",
    "Complete texts, streamed or whole",
    body=CompletionRequest,
    answer=Completion,
    said={200: {JSON: Completion, EVENT_STREAM: str}, **SAID},
    handler=HotRoute,
)
async def create_completion(request: AuthenticatedRequest) -> ASGIApp:
    return await start_generation(request, COMPLETIONS)


@embeddings.post(
    "/v1/embeddings",
    "Create embeddings of texts or of token ids",
    body=EmbeddingRequest,
    answer=EmbeddingList,
    said=SAID,
    handler=HotRoute,
)
async def create_embeddings(request: AuthenticatedRequest) -> ASGIApp:
    return await start_generation(request, EMBEDDINGS)


class InvocationBody(msgspec.Struct):
    """The fields by which the bodies of the three routes differ."""

    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET


_invocation_decoder = msgspec.json.Decoder(InvocationBody)


@invocations.post(
    "/invocations",
    "Create a chat completion, a completion or embeddings, as the body says",
    body=(ChatCompletionRequest, CompletionRequest, EmbeddingRequest),
    said={
        200: {JSON: (ChatCompletion, Completion, EmbeddingList), EVENT_STREAM: str},
        **SAID,
    },
)
async def invoke(request: AuthenticatedRequest) -> ASGIApp:
    context = await parse_request(request)
    asked = decode(_invocation_decoder, context.body)
    if asked.messages is not UNSET:
        return await answer_chat(request, context)
    if asked.prompt is not UNSET:
        return await start_generation(request, COMPLETIONS, context)
    if asked.input is not UNSET:
        return await start_generation(request, EMBEDDINGS, context)
    message = "Missing required parameter: 'messages', 'prompt' or 'input'."
    raise BadField(message, param="messages")


routes = [chat_completions, create_completion, create_embeddings, invoke]
