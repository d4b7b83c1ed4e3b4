"""Makes of `POST /v1/responses` a `GenerationCall` that can be started: what it continues is
read, and its answer is kept. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from gateway.db import DATABASE_ERRORS
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.inference.calls import RequestContext, read_context, read_known, to_call
from gateway.inference.services import GenerationServices
from gateway.lanes import priority_of
from gateway.principal import Principal
from gateway.request_errors import BadField, UnsupportedField
from gateway.responses.background import StartableResponse
from gateway.responses.kept import MAX_KEPT_BYTES, ResponseOwner, StoredResponse, to_json
from gateway.responses.wiring import Responses
from gateway.tenancy.errors import NotFound
from gateway.tools.loop import LoopCall, ToolLoops
from gateway.tools.servers import answered_requests, known_servers, labels_of, refuse_servers
from gateway.wire.openai.from_chat import peek
from gateway.wire.openai_responses.answer import begun, id_of
from gateway.wire.openai_responses.client_tools import CalledTool, ClientTools, HostedTool
from gateway.wire.openai_responses.context import to_messages
from gateway.wire.openai_responses.from_responses import (
    client_tools,
    hosted_tools,
    is_sealed,
    own_items,
    placed_tools,
    read_response,
    to_generate,
)
from gateway.wire.openai_responses.items import Item
from gateway.wire.openai_responses.looped_responses import LoopedResponse, ResponseSteps
from gateway.wire.openai_responses.request import ResponseRequest
from gateway.wire.openai_responses.to_responses import ResponseEncoder, Seal
from gateway.wire.shared.refusals import unsupported
from gateway.wire.surfaces import AnswerFormat

log = logging.getLogger(__name__)

ID_PREFIX = "resp_"
KEEP_TIMEOUT_S = 5.0
"""Then the answer goes out all the same: it was generated, and is on the bill."""
NOTHING_KEPT = "not supported in this project, which keeps nothing"
NEEDS_KEEPING = ("previous_response_id", "conversation", "background")


async def create(
    services: GenerationServices,
    responses: Responses,
    context: RequestContext,
    loops: ToolLoops | None = None,
) -> StartableResponse:
    """Make a response that can be started. `loops`: None if no server's tools can be called.
    Raises: BadField, NotFound, MissingScope."""
    context, request = await read_context(context, read_response)
    servers = known_servers(loops, context.principal, request.tools)
    owner, keeps = ResponseOwner.of(context.principal), is_kept(context, request)
    tools = to_tools(responses, owner, request)
    before = await earlier_items(responses, owner, request)
    given = own_items(request, {item.id: item for item in before})
    generate = to_generate(request, [*before, *given], tools)
    if keeps or request.conversation is not None:
        check_size(given)
    if request.background:
        generate = msgspec.structs.replace(generate, stream=True)  # billed as it is generated
    items = (*before, *given)
    if servers:
        generate = msgspec.structs.replace(generate, has_tools=True)
    seal = partial(responses.seal.seal, owner, "reasoning") if is_sealed(request) else None
    known = labels_of(items) if servers else None
    encoder = partial(to_encoder, request, tools.called, seal, known)
    answer_format = AnswerFormat(id_prefix=ID_PREFIX, encoder=encoder)
    call = to_call(services, answer_format, context, generate)
    assert isinstance(call.encoder, ResponseEncoder)
    created = StartableResponse(
        call=call,
        encoder=call.encoder,
        owner=owner,
        given=given,
        in_background=bool(request.background),
        is_streamed=bool(request.stream),
    )
    if not request.background and (keeps or request.conversation):
        keep = partial(keep_answer, responses, created, keeps)
        call = msgspec.structs.replace(call, before_end=keep)
        created = msgspec.structs.replace(created, call=call)
    answers = answered_requests(before, given, servers)
    if not servers:
        return created
    assert loops is not None and isinstance(call.encoder, LoopedResponse)
    loop = LoopCall(
        loops=loops,
        call=call,
        steps=ResponseSteps(call.encoder),
        servers=servers,
        choice=request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        max_calls=request.max_tool_calls,
        answers=answers,
        with_approved=lambda done: to_messages(request.instructions, [*items, *done]),
        new_meter=context.meter.again,
    )
    return msgspec.structs.replace(created, loop=loop)


async def count_input(
    services: GenerationServices, responses: Responses, principal: Principal, body: bytes
) -> int:
    """Count the tokens of what would be asked, with what it continues. Raises: BadField, NotFound,
    NoSlot."""
    principal.check_served()
    route = services.fleet.resolve(peek(body).model, principal)
    request, _, _ = await read_known(body, read_response, route)
    check_may_keep(principal, request)
    refuse_servers(request.tools, "what a server offers is not counted")
    owner = ResponseOwner.of(principal)
    tools = to_tools(responses, owner, request)
    before = await earlier_items(responses, owner, request)
    given = own_items(request, {item.id: item for item in before})
    generate = to_generate(request, [*before, *given], tools)
    replicas = services.fleet.order(route)
    return await replicas[0].count(generate, priority_of(principal, services.deadlines, generate))


def is_kept(context: RequestContext, request: ResponseRequest) -> bool:
    """Return whether a response is kept: as OpenAI's, unless it says otherwise, or the project
    does. Raises: BadField."""
    check_may_keep(context.principal, request)
    if context.principal.keeps_nothing:
        return False
    if request.background and request.store is False:
        message = "background can only be used when `store` is true."
        raise UnsupportedField(message, param="background")
    return request.store is not False


def check_may_keep(principal: Principal, request: ResponseRequest) -> None:
    """Raises: BadField."""
    for name in NEEDS_KEEPING:
        if principal.keeps_nothing and getattr(request, name):
            raise unsupported(name, NOTHING_KEPT)


async def earlier_items(
    responses: Responses, owner: ResponseOwner, request: ResponseRequest
) -> tuple[Item, ...]:
    """Return what a response continues. Raises: BadField, NotFound."""
    if request.conversation is not None:
        return await responses.conversations.items(owner, id_of(request.conversation))
    if request.previous_response_id is not None:
        return await responses.store.context(owner, request.previous_response_id)
    return ()


def check_size(given: tuple[Item, ...]) -> None:
    """Raises: BadField."""
    if len(to_json(given)) > MAX_KEPT_BYTES:
        raise BadField(
            f"Invalid value for 'input': more than {MAX_KEPT_BYTES} bytes, which is the most that"
            " is stored; with 'store': false it is answered.",
            param="input",
        )


def to_tools(responses: Responses, owner: ResponseOwner, request: ResponseRequest) -> ClientTools:
    """Open what is sealed in a request, and return its own tools. Raises: BadField."""
    request.input = responses.seal.unseal_items(owner, request.input)
    if responses.refuses_hosted_tools:
        for path, tool in placed_tools(request):
            if isinstance(tool, HostedTool):
                raise unsupported(f"{path}.type", "not supported here: nobody runs that tool")
    return client_tools(request)


def to_encoder(
    request: ResponseRequest,
    called: Mapping[str, CalledTool],
    seal: Seal | None,
    listed: frozenset[str] | None,
    generate: GenerateRequest,
    heading: AnswerHeader,
) -> ResponseEncoder:
    """Make the encoder. `called`: tools that the client knows by another name than the model;
    `seal`: for what was thought; `listed`: servers whose tools it knows already; None: none are
    called here."""
    response = begun(
        request,
        id=heading.id,
        created_at=heading.created,
        service_tier=heading.service_tier,
        status="queued" if request.background else "in_progress",
        left_out=hosted_tools(request),
    )
    options: dict[str, Any] = {"stream": generate.stream, "called": called, "seal": seal}
    if listed is not None:
        return LoopedResponse(response, known=listed, **options)
    return ResponseEncoder(response, **options)


async def keep_answer(responses: Responses, created: StartableResponse, keeps: bool) -> None:
    """Keep the answer before its last bytes go out, so that whoever has them finds it."""
    response = created.encoder.response
    try:
        async with asyncio.timeout(KEEP_TIMEOUT_S):
            kept = StoredResponse.of(created.given, response)
            added_to = None if response.conversation is None else response.conversation.id
            if keeps:
                await responses.store.keep(
                    created.owner,
                    response.id,
                    kept,
                    status=response.status,
                    previous_id=response.previous_response_id,
                    added_to=added_to,
                )
            elif added_to is not None:
                await responses.conversations.add_items(created.owner, added_to, kept.items)
    except (*DATABASE_ERRORS, BadField, NotFound) as error:
        log.error("the response %s could not be kept (%s)", response.id, type(error).__name__)
