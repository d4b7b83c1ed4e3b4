"""Serves all routes that answer with generated tokens: reads the request, starts the generation,
answers with what it delivers."""

from __future__ import annotations

import time
from functools import partial

from litestar.openapi.spec import OpenAPIType, Parameter, Schema
from litestar.types import ASGIApp

from billing.ledger.tags import MAX_TAGS
from foundation.stages import Stage
from gateway.inference.calls import RequestContext, read_context, to_call
from gateway.inference.generate import start
from gateway.lanes import MAX_DEADLINE_MS, read_deadline_s
from gateway.routes.shared.access import AuthenticatedRequest, services
from gateway.routes.shared.body import read_once
from gateway.routes.shared.idempotency import HEADER, read_key, reply_once
from gateway.routes.shared.operations import text_header
from gateway.routes.shared.reply import Reply, received_at_of
from gateway.routes.shared.request_state import METER, MODEL, REQUEST_ID
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.openai.from_chat import peek_or_name
from gateway.wire.surfaces import ApiSurface
from gateway.wire.usage.cost import asks_cost
from gateway.wire.usage.tags import MAX_CHARS, TAGS_PATTERN, read_tags

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
ONCE = text_header(
    HEADER,
    "Repeated with the same key within 24 hours, the request is answered as before and billed"
    " once.",
)
HEADERS = (DEADLINE, SHOWS_COST, TAGS, ONCE)
OURS = frozenset(each.name.lower().encode() for each in HEADERS)
"""Found in one walk over what came."""
REFUSALS = (402, 404, 408, 409, 422, 429, 503, 504)
"""Beside those of every route: an upstream's own refusals keep their status."""


async def parse_request(request: AuthenticatedRequest, sent: bytes | None = None) -> RequestContext:
    """Read the request. `sent`: the body, where a form of ours was sent in its place.

    Raises: BadField, UnknownModel, EncodedBody.
    """
    found = services(request)
    read_from = time.perf_counter()
    asked = [each for each in request.scope["headers"] if each[0] in OURS]
    deadline_s, tags, key = read_deadline_s(asked), read_tags(asked), read_key(asked)
    sent = await read_once(request) if sent is None else sent
    body, peeked = peek_or_name(sent, partial(found.generation.fleet.only_model, request.user))
    model = peeked.model
    state = request.scope["state"]
    meter = RequestMeter(found.telemetry, model, received_at=received_at_of(request.scope))
    state[MODEL], state[METER], meter.tags = model, meter, tags
    meter.stages.add(Stage("read", read_from, time.perf_counter()))
    return RequestContext(
        request_id=state[REQUEST_ID],
        principal=request.user,
        meter=meter,
        body=body,
        idempotency_key=key,
        deadline_s=deadline_s,
        shows_cost=asks_cost(asked, request.user.shows_cost),
        tags=tags,
        route=found.generation.fleet.resolve(model, request.user),
    )


async def start_generation(
    request: AuthenticatedRequest, surface: ApiSurface, context: RequestContext | None = None
) -> ASGIApp:
    """Start the generation.

    Raises: BadField, UnknownModel, EncodedBody, RequestConflict; later failures are told in the
    answer.
    """
    context, generation = context or await parse_request(request), services(request).generation
    dialect = context.route.dialect
    context, generate = await read_context(context, lambda each: surface.read(each, dialect))
    call = to_call(generation, surface, context, generate)

    def begin() -> Reply:
        return Reply(start(generation, call), stream=call.request.stream)

    return await reply_once(request, context, begin)
