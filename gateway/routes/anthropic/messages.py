"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's surface."""

from __future__ import annotations

import re
from typing import Any

from litestar.openapi.spec import OpenAPIType, Parameter, Schema
from litestar.types import ASGIApp

from gateway.inference.calls import read_known
from gateway.lanes import priority_of
from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
from gateway.routes.shared.access import AuthenticatedRequest, HotRoute, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.generation import HEADERS, REFUSALS, start_generation
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.routes.shared.problem import VERSION_HEADER
from gateway.routes.shared.request_state import MODEL
from gateway.wire.anthropic.answer import AnthropicMessage
from gateway.wire.anthropic.from_anthropic import from_count_tokens
from gateway.wire.anthropic.messages import CountTokensRequest, MessagesRequest, MessageTokensCount
from gateway.wire.anthropic.reports import AnthropicError, to_status
from gateway.wire.openai.from_chat import peek
from gateway.wire.surfaces import MESSAGES

OLDEST_VERSION = "2023-06-01"
"""The first whose streams are these. Those since then ask and answer alike here: what a later one
takes out of a request (`temperature`) is honoured in each. Who names none gets the same: the
official SDKs always do, and what a person types need not."""
VERSION_PATTERN = "^20[0-9]{2}-[0-9]{2}-[0-9]{2}$"
VERSION_NAMED = Parameter(
    name=VERSION_HEADER.decode(),
    param_in="header",
    description=f"The version of the API, from {OLDEST_VERSION} on.",
    required=False,
    schema=Schema(type=OpenAPIType.STRING, pattern=VERSION_PATTERN),
)
messages = RouteGroup(tag="Messages", opt=needs(SCOPE_INFERENCE), headers=(VERSION_NAMED,))


def refusals(*those: int) -> dict[int, dict[str, Any]]:
    return {to_status(status, None): {JSON: AnthropicError} for status in those}


@messages.post(
    "/v1/messages",
    "Create a message, streamed or whole",
    body=MessagesRequest,
    answer=AnthropicMessage,
    handler=HotRoute,
    headers=HEADERS,
    said={200: {JSON: AnthropicMessage, EVENT_STREAM: str}, **refusals(*REFUSALS)},
)
async def create_message(request: AuthenticatedRequest) -> ASGIApp:
    names_version(request)
    return await start_generation(request, MESSAGES)


@messages.post(
    "/v1/messages/count_tokens",
    "Count the tokens of a prompt: those of a model of ours as they would be billed",
    body=CountTokensRequest,
    answer=MessageTokensCount,
    said=refusals(402, 404, 503),
)
async def count_tokens(request: AuthenticatedRequest) -> MessageTokensCount:
    names_version(request)
    generation, principal = services(request).generation, request.user
    principal.check_served()
    body = await plain_body(request)
    peeked = peek(body)
    request.scope["state"][MODEL] = peeked.model
    route = generation.fleet.resolve(peeked.model, principal)
    replicas = generation.fleet.order(route)
    asked, _, _ = await read_known(body, from_count_tokens, route)
    counted = await replicas[0].count(asked, priority_of(principal, generation.deadlines, asked))
    return MessageTokensCount(counted)


def names_version(request: AuthenticatedRequest) -> bool:
    """Raises BadField, for one that is none or too old."""
    headers = request.scope["headers"]
    named = [value.decode("latin-1") for name, value in headers if name == VERSION_HEADER]
    for version in named:
        if re.fullmatch(VERSION_PATTERN, version) is None or version < OLDEST_VERSION:
            param = VERSION_HEADER.decode()
            message = f"Invalid value for '{param}': expected {OLDEST_VERSION} or a later one."
            raise BadField(message, param=param)
    return bool(named)


routes = [create_message, count_tokens]
