"""Defines what a line may ask, by its path: how its body becomes a call, and how it is refused
there. A line is refused in the words and the shape of its own surface, as a client that waits would
be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import attrgetter

import msgspec

from gateway.http_errors.table import HttpError, to_http_error
from gateway.inference.calls import GenerationCall, RequestContext, read_context, to_call
from gateway.inference.services import GenerationServices
from gateway.request_errors import UnsupportedField
from gateway.responses.creation import create
from gateway.responses.wiring import Responses
from gateway.tools.servers import refuse_servers
from gateway.wire.anthropic.reports import to_anthropic_error, to_error_type, to_status
from gateway.wire.openai_responses.from_responses import read_response
from gateway.wire.surfaces import ApiSurface

NOT_OF_A_RESPONSE = {
    "background": "a batch runs there anyway",
    "stream": "the answers of a batch are not streamed",
    "conversation": "a line that is run again would be in it twice",
}
"""Fields that a batch line may not use on `/v1/responses`, each with the reason."""


def in_openai_shape(found: HttpError, request_id: str) -> bytes:
    return found.encode()


def in_anthropic_shape(found: HttpError, request_id: str) -> bytes:
    status = to_status(found.status, found.body.code)
    body = found.body
    return msgspec.json.encode(to_anthropic_error(status, body.message, request_id, body.param))


def of_anthropic_type(found: HttpError) -> str:
    return to_error_type(to_status(found.status, found.body.code))


class LineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    to_call: Callable[[RequestContext], Awaitable[GenerationCall]]
    """Raises what the surface raises: BadField, NotFound."""
    to_http_error: Callable[[Exception], HttpError] = to_http_error
    encode: Callable[[HttpError, str], bytes] = in_openai_shape
    """Encodes an error together with the id of its request."""
    code_of: Callable[[HttpError], str] = attrgetter("code")
    """Returns the code that a client reads in it, or its type."""


async def ask_surface(
    services: GenerationServices, surface: ApiSurface, context: RequestContext
) -> GenerationCall:
    """Make a call of a line's body. Raises: BadField."""
    dialect = context.route.dialect
    context, generate = await read_context(context, lambda body: surface.read(body, dialect))
    if generate.stream:
        raise not_here("stream", NOT_OF_A_RESPONSE["stream"])
    return to_call(services, surface, context, generate)


async def ask_response(
    services: GenerationServices, responses: Responses, context: RequestContext
) -> GenerationCall:
    """Make a call of a line for `/v1/responses`. Raises: BadField, NotFound."""
    context, asked = await read_context(context, read_response)
    for name, why in NOT_OF_A_RESPONSE.items():
        if getattr(asked, name):
            raise not_here(name, why)
    refuse_servers(asked.tools, "a line that is run again would call them twice")
    return (await create(services, responses, context)).call


def not_here(param: str, why: str) -> UnsupportedField:
    message = f"Unsupported parameter: '{param}' is not supported in a batch: {why}."
    return UnsupportedField(message, param=param)
