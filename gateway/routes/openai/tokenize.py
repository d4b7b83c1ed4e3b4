"""/v1/tokenize, /v1/detokenize and /v1/tokenizer_info: what a prompt is in tokens, and back, and by
what tokenizer. Nobody pays for it; to the limits it is a request. vLLM has them without `/v1`, too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from litestar import Response

from gateway.fleet.replica import TokenizingReplica
from gateway.generate_request import GenerateRequest
from gateway.inference.calls import read_known
from gateway.inference.generate import RateLimited
from gateway.lanes import Priority, priority_of
from gateway.limits.outcomes import Refusal, Units
from gateway.principal import SCOPE_INFERENCE
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.generation import REFUSALS
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.routes.shared.request_state import MODEL, REQUEST_ID
from gateway.wire.openai.from_chat import peek_or_name
from gateway.wire.openai.plain_prompts import not_of_an_upstream
from gateway.wire.openai.tokenizing import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
    TokenizerQuery,
    from_detokenize,
    from_tokenize,
)
from gateway.wire.organization.usage import parse_query

tokens = RouteGroup(tag="Tokens", opt=needs(SCOPE_INFERENCE))
SAID = {status: {JSON: ErrorEnvelope} for status in REFUSALS}
NOTHING = Units()


@tokens.post(
    ["/v1/tokenize", "/tokenize"],
    "What a text or a conversation is in tokens",
    body=TokenizeRequest,
    answer=TokenizeAnswer,
    said=SAID,
)
async def tokenize(request: AuthenticatedRequest) -> Response[bytes]:
    body, model = with_default(request, await plain_body(request))
    async with admitted(request, model) as (replica, priority):
        route = services(request).generation.fleet.resolve(model, request.user)
        read = partial(from_tokenize, dialect=route.dialect)
        asked, _, _ = await read_known(body, read, route)
        found = await replica.tokenize(asked, priority)
    return to_response(
        TokenizeAnswer(
            count=len(found.token_ids),
            max_model_len=found.max_model_len,
            tokens=found.token_ids,
            token_strs=found.texts,
        )
    )


@tokens.post(
    ["/v1/detokenize", "/detokenize"],
    "The text of tokens",
    body=DetokenizeRequest,
    answer=DetokenizeAnswer,
    said=SAID,
)
async def detokenize(request: AuthenticatedRequest) -> Response[bytes]:
    body, model = with_default(request, await plain_body(request))
    async with admitted(request, model) as (replica, priority):
        route = services(request).generation.fleet.resolve(model, request.user)
        asked, _, _ = await read_known(body, from_detokenize, route)
        return to_response(DetokenizeAnswer(prompt=await replica.detokenize(asked, priority)))


@tokens.get(
    ["/v1/tokenizer_info", "/tokenizer_info"],
    "The tokenizer of a model and its chat template",
    query=TokenizerQuery,
    answer=TokenizerInfo,
    said=SAID,
)
async def tokenizer_info(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, TokenizerQuery)
    _, model = with_default(request, msgspec.json.encode({"model": query.model or None}))
    async with admitted(request, model) as (replica, _):
        return to_response(msgspec.convert(replica.describe_tokenizer(), TokenizerInfo))


def with_default(request: AuthenticatedRequest, body: bytes) -> tuple[bytes, str]:
    """Return the body and its model, which the only one stands in for where it names none. Raises
    BadField."""
    fleet = services(request).generation.fleet
    body, peeked = peek_or_name(body, partial(fleet.only_model, request.user))
    return body, peeked.model


@asynccontextmanager
async def admitted(
    request: AuthenticatedRequest, model: str
) -> AsyncIterator[tuple[TokenizingReplica, Priority]]:
    """Admit the request like one that writes nothing; within, it counts.

    Raises: BadField, UnknownModel, RateLimited, and what the limiter and who is not served raise.
    """
    generation, principal = services(request).generation, request.user
    state = request.scope["state"]
    state[MODEL] = model
    fleet = generation.fleet
    replica = fleet.order(fleet.resolve(model, principal))[0]
    if not isinstance(replica, TokenizingReplica):
        raise not_of_an_upstream()
    principal.check_served()
    asked = GenerateRequest(model=model, stream=False, include_usage=False)
    priority = priority_of(principal, generation.deadlines, asked)
    verdict = await generation.limiter.admit(
        principal,
        model,
        input_tokens=0,
        max_output_tokens=0,
        lease_id=state[REQUEST_ID],
        lane=priority.lane,
        prices=generation.price_book.at(model, time.time(), priority.tier, principal.price_list),
    )
    if isinstance(verdict, Refusal):
        raise RateLimited(verdict)
    try:
        yield replica, priority
    finally:
        await generation.limiter.settle(verdict, NOTHING)


def to_response(answer: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(answer), media_type=JSON)


routes = [tokenize, detokenize, tokenizer_info]
