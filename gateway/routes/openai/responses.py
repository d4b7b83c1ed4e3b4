"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec
from litestar import Response
from litestar.params import FromPath
from litestar.response import Stream
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.http_errors.table import HttpError, to_responses_error
from gateway.inference.calls import RequestContext
from gateway.inference.generate import start
from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
from gateway.responses.background import StartableResponse
from gateway.responses.compaction import compact
from gateway.responses.creation import count_input, create
from gateway.responses.kept import ResponseOwner, to_json
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.generation import HEADERS, REFUSALS, parse_request
from gateway.routes.shared.idempotency import (
    REPLAYED,
    ReplayedReply,
    claim_once,
    released_on_failure,
    reply_once,
)
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.routes.shared.reply import Reply
from gateway.routes.shared.request_state import MODEL
from gateway.tenancy.idempotency_keys import Answer
from gateway.wire.openai.from_chat import peek_or_name
from gateway.wire.openai_responses import answer as responses_answer
from gateway.wire.openai_responses.compaction import CompactedResponse, CompactRequest
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.queries import ItemsQuery, RetrieveQuery
from gateway.wire.openai_responses.request import ResponseRequest
from gateway.wire.openai_responses.to_responses import ResponseEncoder
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import unsupported
from gateway.wire.shared.unknown_fields import to_ignored_header
from gateway.wire.surfaces import RESPONSES

RESPONSE = RESPONSES + "/{response_id:str}"
responses = RouteGroup(tag="Responses", opt=needs(SCOPE_INFERENCE))
ANSWERS = {JSON: responses_answer.ResponseObject, EVENT_STREAM: str}
SAID = {status: {JSON: ErrorEnvelope} for status in REFUSALS}


class ResponseId(msgspec.Struct):
    id: str


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@responses.post(
    RESPONSES,
    "Create a response, streamed or whole",
    body=ResponseRequest,
    answer=responses_answer.ResponseObject,
    headers=HEADERS,
    said={200: ANSWERS, **SAID},
    handler=HotRoute,
)
async def create_response(request: AuthenticatedRequest) -> ASGIApp:
    found = services(request)
    context = await parse_request(request)
    created = await create(found.generation, found.responses, context, found.tool_loops)
    if created.in_background:
        context.principal.check_served()
        return await in_background(request, context, created)

    def begin() -> Reply:
        return Reply(
            created.start(found.generation),
            stream=created.call.request.stream,
            to_http_error=to_responses_error,
            fail=partial(fail, created.encoder),
        )

    return await reply_once(request, context, begin)


@responses.post(
    RESPONSES + "/compact",
    "Make a conversation shorter: a summary that stands in its place, sealed",
    body=CompactRequest,
    answer=CompactedResponse,
    headers=HEADERS,
    said=SAID,
)
async def compact_conversation(request: AuthenticatedRequest) -> ASGIApp:
    found = services(request)
    context = await parse_request(request)
    call = await compact(found.generation, found.responses, context)

    def begin() -> Reply:
        return Reply(start(found.generation, call), stream=False)

    return await reply_once(request, context, begin)


async def in_background(
    request: AuthenticatedRequest, context: RequestContext, created: StartableResponse
) -> ASGIApp:
    """Start a response in the background.

    An `Idempotency-Key` keeps the queued response: a retry names the same one, whatever has become
    of it. Raises: TooManyAtOnce, NotAccepting, what `claim_once` raises.
    """
    found = services(request)
    if created.is_streamed:  # or it would be run, and billed, for who hears nothing of it
        found.responses.background.check_followers(request.user.org_id)
    if context.idempotency_key is None:
        queued = await found.responses.background.run(created)
        return await answer(request, created, queued)
    claim, known = await claim_once(request, context.idempotency_key, context.body)
    if known is not None and not created.is_streamed:
        return ReplayedReply(known)
    if known is not None:
        return await answer(request, created, known.body, dict([REPLAYED]))

    async def keep(conn: AsyncConnection, answer: bytes) -> None:
        headers = [(b"content-type", JSON.encode())]
        kept = Answer(status=200, headers=headers, body=answer)
        await found.idempotency_keys.keep_within(conn, claim, kept)

    async with released_on_failure(found.idempotency_keys, claim):
        queued = await found.responses.background.run(created, within=keep)
    return await answer(request, created, queued)


async def answer(
    request: AuthenticatedRequest,
    created: StartableResponse,
    queued: bytes,
    headers: dict[bytes, bytes] | None = None,
) -> ASGIApp:
    """Answer with a response as it stands or, where it is to be streamed, as it becomes: who leaves
    comes back to `GET /v1/responses/{response_id}?stream=true`."""
    noted = to_ignored_header(created.call.ignored)
    if not created.is_streamed:
        return ASGIResponse(body=queued, media_type=JSON, status_code=200, headers=noted)
    response_id = msgspec.json.decode(queued, type=ResponseId).id
    extra = {name.decode(): value.decode() for name, value in (headers or {}).items()} | noted
    stream = await followed(request, response_id, -1, extra, is_owed=True)
    return stream.to_asgi_response(None, request)


async def followed(
    request: AuthenticatedRequest,
    response_id: str,
    after: int,
    headers: dict[str, str] | None = None,
    *,
    is_owed: bool = False,
) -> Stream:
    """Raises: NotFound, BadField, NotAccepting, TooManyFollowed."""
    background = services(request).responses.background
    events = await background.follow(
        ResponseOwner.of(request.user), response_id, after, is_owed=is_owed
    )
    sent = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
    return Stream(events, media_type=EVENT_STREAM, headers=sent)


def fail(encoder: ResponseEncoder, http_error: HttpError) -> bytes:
    return encoder.fail(status=http_error.status, message=http_error.body.message)


@responses.get(
    RESPONSE,
    "A response that is kept, as it was answered, or its events from one on",
    query=RetrieveQuery,
    answer=responses_answer.ResponseObject,
    said={200: ANSWERS, 429: {JSON: ErrorEnvelope}},
)
async def retrieve(
    request: AuthenticatedRequest, response_id: FromPath[str]
) -> Response[bytes] | Stream:
    query = parse_query(request.url.query, RetrieveQuery)
    if query.stream:
        if query.include_obfuscation:
            raise unsupported("include_obfuscation", "not supported: events are not padded")
        after = -1 if query.starting_after is None else query.starting_after
        return await followed(request, response_id, after)
    if query.starting_after is not None:
        raise BadField(
            "The 'starting_after' parameter is only allowed when 'stream' is enabled.",
            param="starting_after",
        )
    kept = await services(request).responses.store.find(ResponseOwner.of(request.user), response_id)
    return Response(kept.answer, media_type=JSON)


@responses.delete(
    RESPONSE,
    "Forget a response; those that continue it cannot be continued any more",
    answer=DeletedResponse,
)
async def forget(request: AuthenticatedRequest, response_id: FromPath[str]) -> Response[bytes]:
    await services(request).responses.store.delete(ResponseOwner.of(request.user), response_id)
    return Response(to_json(DeletedResponse(id=response_id)), media_type=JSON)


@responses.get(
    RESPONSE + "/input_items",
    "What a response was given, without what it continues",
    query=ItemsQuery,
    answer=ItemList,
)
async def input_items(request: AuthenticatedRequest, response_id: FromPath[str]) -> Response[bytes]:
    query = parse_query(request.url.query, ItemsQuery)
    kept = await services(request).responses.store.find(ResponseOwner.of(request.user), response_id)
    return Response(to_json(page(list(kept.given_items), query)), media_type=JSON)


def page(items: list[Item], query: ItemsQuery) -> ItemList:
    """Raises: BadField (after)."""
    if query.order == "desc":
        items.reverse()
    start_at = 0
    if query.after is not None:
        ids = [item.id for item in items]
        if query.after not in ids:
            raise BadField(f"No item with id '{query.after}'.", param="after")
        start_at = ids.index(query.after) + 1
    data = items[start_at : start_at + query.limit]
    return to_list(data, more=start_at + len(data) < len(items))


def to_list(data: list[Item], *, more: bool) -> ItemList:
    return ItemList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=more,
    )


@responses.post(
    RESPONSE + "/cancel",
    "End a response that runs in the background; what was generated is billed",
    answer=responses_answer.ResponseObject,
)
async def cancel(request: AuthenticatedRequest, response_id: FromPath[str]) -> Response[bytes]:
    background = services(request).responses.background
    answer = await background.cancel(ResponseOwner.of(request.user), response_id)
    return Response(answer, media_type=JSON)


@responses.post(
    RESPONSES + "/input_tokens",
    "Count the tokens of what a response would be asked",
    body=ResponseRequest,
    answer=InputTokens,
    said=SAID,
)
async def input_tokens(request: AuthenticatedRequest) -> Response[bytes]:
    found, sent = services(request), await plain_body(request)
    body, peeked = peek_or_name(sent, partial(found.generation.fleet.only_model, request.user))
    request.scope["state"][MODEL] = peeked.model
    counted = await count_input(found.generation, found.responses, request.user, body)
    return Response(to_json(InputTokens(input_tokens=counted)), media_type=JSON)


routes = [
    compact_conversation,
    create_response,
    retrieve,
    forget,
    input_items,
    cancel,
    input_tokens,
]
