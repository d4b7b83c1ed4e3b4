"""POST /v1/chat/completions. Thin: read, start the generation, answer with what it delivers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.openapi.spec import OpenAPIType, Parameter, Schema
from litestar.types import ASGIApp

from billing.usage_tags import MAX_TAGS
from gateway.errors import EncodedBody
from gateway.inference import Call, start
from gateway.lanes import MAX_DEADLINE_MS, read_deadline_s, turn_of
from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.routes.access import HotRoute, needs, services
from gateway.routes.counted import MODEL
from gateway.routes.envelope import REQUEST_ID
from gateway.routes.operations import ErrorEnvelope, describes
from gateway.routes.reply import JSON, Reply
from gateway.telemetry import RequestMeter
from gateway.wire.answer import ChatCompletion
from gateway.wire.cost import asks_cost
from gateway.wire.from_openai import from_openai, peek
from gateway.wire.openai import ChatCompletionRequest
from gateway.wire.tags import MAX_CHARS, TAGS_PATTERN, read_tags
from gateway.wire.to_openai import to_openai

DEADLINE = Parameter(
    name="X-Request-Timeout-Ms",
    param_in="header",
    description=(
        "How long the answer may take. What cannot begin by then is refused with 503; what is not"
        " complete by then is cut off, billed for what was generated, and ends with 504, as an"
        " error event where it has begun to stream."
    ),
    required=False,
    schema=Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=MAX_DEADLINE_MS),
)
SHOWS_COST = Parameter(
    name="X-Tollgate-Cost",
    param_in="header",
    description="Say what the answer cost: in `usage.cost`, of a stream where that asks for its"
    " usage, and in the header of the same name of an answer that is one body. Without it, as the"
    " key or its organization is set (`shows_cost`).",
    required=False,
    schema=Schema(type=OpenAPIType.STRING, enum=["true", "false", "1", "0"]),
)
TAGS = Parameter(
    name="X-Tollgate-Tags",
    param_in="header",
    description=f"What its usage is counted by, as `team=search,feature=chat`: at most {MAX_TAGS}.",
    required=False,
    schema=Schema(type=OpenAPIType.STRING, pattern=TAGS_PATTERN, max_length=MAX_CHARS),
)
OURS = frozenset(each.name.lower().encode() for each in (DEADLINE, SHOWS_COST, TAGS))
"""Found in one walk over what came."""
ANSWERS = {JSON: ChatCompletion, "text/event-stream": str}
REFUSALS = {status: {JSON: ErrorEnvelope} for status in (402, 404, 408, 409, 422, 429, 503, 504)}
"""Beside those of every route: an upstream's own refusals keep their status."""


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
        headers=[DEADLINE, SHOWS_COST, TAGS],
        said={200: ANSWERS, **REFUSALS},
    ),
)
async def chat_completions(request: Request[Principal, Any, Any]) -> ASGIApp:
    found = services(request)
    asked = [each for each in request.scope["headers"] if each[0] in OURS]
    deadline_s, tags = read_deadline_s(asked), read_tags(asked)
    body = await read_once(request)
    peeked = peek(body)
    state = request.scope["state"]
    state[MODEL] = peeked.model
    meter = RequestMeter(found.telemetry, peeked.model)
    route = found.desk.fleet.resolve(peeked.model, request.user)
    generate = from_openai(body, route.kind)
    turn = turn_of(
        request.user,
        found.desk.deadlines,
        generate,
        deadline_s=deadline_s,
        sells_priority=found.desk.sells_priority,
    )
    request_id = state[REQUEST_ID]
    completion_id = "chatcmpl-" + request_id.removeprefix("req_")
    call = Call(
        request_id=request_id,
        principal=request.user,
        request=generate,
        turn=turn,
        encoder=to_openai(
            generate,
            completion_id=completion_id,
            created=int(time.time()),
            service_tier=turn.tier,
        ),
        meter=meter,
        timeout_s=deadline_s,
        shows_cost=asks_cost(asked, request.user.shows_cost),
        tags=tags,
    )
    return Reply(start(found.desk, call), stream=generate.stream)


async def plain_body(request: Request[Principal, Any, Any]) -> bytes:
    """Raises EncodedBody."""
    refuse_coded(request.scope["headers"])
    return await request.body()


def refuse_coded(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises EncodedBody."""
    for name, value in headers:
        if name == b"content-encoding":
            codings = value.decode("latin-1").lower().split(",")
            if any(coding.strip() not in ("", "identity") for coding in codings):
                raise EncodedBody


async def read_once(request: Request[Principal, Any, Any]) -> bytes:
    """As `plain_body`, which can be asked again, and for that takes an object of all headers and a
    generator. Raises: EncodedBody, RequestEntityTooLarge."""
    headers = request.scope["headers"]
    refuse_coded(headers)
    most = request.route_handler.resolve_request_max_body_size() or math.inf
    for name, value in headers:
        if name == b"content-length" and int(value) > most:  # the server has read it, too
            raise RequestEntityTooLarge
    pieces: list[bytes] = []
    size_bytes, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] != "http.request":
            raise InternalServerException("the client left before its body had come")
        pieces.append(message["body"])
        size_bytes += len(message["body"])
        if size_bytes > most:
            raise RequestEntityTooLarge
        more = message.get("more_body", False)
    return b"".join(pieces)


routes = [chat_completions]
