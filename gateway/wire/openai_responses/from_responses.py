"""A `Response`'s body to a `GenerateRequest`, or the name of the field that is in the way.

Knows no HTTP, no replica and no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.generate_request import ChatPrompt, GenerateRequest, OutputForm, Tool, ToolUse
from gateway.ids import uuid7_hex
from gateway.request_errors import BadField
from gateway.wire.constraints.format_structs import JsonObjectFormat
from gateway.wire.constraints.to_grammar import check_size, of_json_object, of_schema
from gateway.wire.constraints.to_tool_use import (
    allowed,
    known,
    offered,
    only_with_tools,
)
from gateway.wire.openai.from_chat import default, nucleus, stop_strings
from gateway.wire.openai_responses.client_tools import ClientTools, HostedTool, to_client_tools
from gateway.wire.openai_responses.context import text_size_of_calls, to_items, to_messages
from gateway.wire.openai_responses.items import MAX_ITEMS, InAdditionalTools, Item, with_type
from gateway.wire.openai_responses.mcp_tools import McpChoice, only_mcp
from gateway.wire.openai_responses.request import (
    LOGPROBS,
    NOT_YET,
    SEALED,
    CustomChoice,
    FunctionChoice,
    RequestTool,
    ResponseAllowedTools,
    ResponseRequest,
    SchemaFormat,
)
from gateway.wire.shared.refusals import check_values, decode, to_bad_value, unsupported

T = TypeVar("T")

_any_decoder = msgspec.json.Decoder()


def read_response(body: bytes) -> ResponseRequest:
    """Raises BadField."""
    request = read_items(body, "input", ResponseRequest)
    check(request)
    return request


def read_items(body: bytes, field: str, kind: type[T]) -> T:
    """Read the items in `field`, which may come without their types. Raises BadField."""
    check_values(body)
    found: Any = decode(_any_decoder, body)
    if isinstance(found, dict) and isinstance(found.get(field), list):
        found[field] = [with_type(item) for item in found[field]]
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise to_bad_value(str(error), not_yet=not_yet_of(field)) from error


def not_yet_of(field: str) -> Mapping[str, frozenset[str]]:
    return {path.replace("input[]", f"{field}[]"): values for path, values in NOT_YET.items()}


def check(request: ResponseRequest) -> None:
    """Check what involves more than one field. Raises BadField."""
    if request.stream_options is not None:
        if not request.stream:
            raise BadField(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                param="stream_options",
            )
        if request.stream_options.include_obfuscation:
            raise unsupported(
                "stream_options.include_obfuscation", "not supported: events are not padded"
            )
    if request.conversation is not None and request.previous_response_id is not None:
        raise BadField(
            "Give one of 'conversation' and 'previous_response_id'.", param="conversation"
        )
    if request.top_logprobs and not shows_logprobs(request):
        raise BadField(
            f"The 'top_logprobs' parameter is only allowed when 'include' has '{LOGPROBS}'.",
            param="top_logprobs",
        )


def shows_logprobs(request: ResponseRequest) -> bool:
    return LOGPROBS in (request.include or ())


def is_sealed(request: ResponseRequest) -> bool:
    """Return whether what is thought is to be carried by the client, sealed."""
    return SEALED in (request.include or ())


def new_id(prefix: str) -> str:
    return prefix + uuid7_hex()


def placed_tools(request: ResponseRequest) -> Iterator[tuple[str, RequestTool]]:
    """Return all tools of a request, each with its path."""
    yield from ((f"tools[{index}]", tool) for index, tool in enumerate(request.tools or ()))
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if isinstance(item, InAdditionalTools):
            for number, tool in enumerate(item.tools):
                yield f"input[{index}].tools[{number}]", tool


def hosted_tools(request: ResponseRequest) -> tuple[str, ...]:
    """Return the types of the tools that the vendor's servers would run, each once."""
    types = (
        type(tool).__struct_config__.tag
        for _, tool in placed_tools(request)
        if isinstance(tool, HostedTool)
    )
    return tuple(dict.fromkeys(map(str, types)))


def client_tools(request: ResponseRequest) -> ClientTools:
    """Return the tools that the client runs. Raises BadField."""
    return to_client_tools(placed_tools(request))


def own_items(request: ResponseRequest, stored: Mapping[str, Item]) -> tuple[Item, ...]:
    """Return the items that a request adds to what it continues. Raises BadField."""
    return to_items(request.input, new_id, stored, without=InAdditionalTools)


def to_generate(
    request: ResponseRequest, items: Sequence[Item], tools: ClientTools | None = None
) -> GenerateRequest:
    """Convert a request. `items`: what it continues, and its own; `tools`: its `client_tools`,
    where they are known. Raises BadField."""
    tools = client_tools(request) if tools is None else tools
    if not items:
        raise BadField("Missing required parameter: 'input'.", param="input")
    if len(items) > MAX_ITEMS:
        raise BadField(
            f"Invalid value for 'input': with what it continues it has more than {MAX_ITEMS}"
            " items.",
            param="input",
        )
    messages = to_messages(request.instructions, items)
    top_p, top_k = nucleus(request.top_p, request.top_k)
    return GenerateRequest(
        model=request.model,
        stream=bool(request.stream),
        include_usage=True,
        service_tier=request.service_tier,
        has_tools=bool(tools.functions),
        cache_key=request.prompt_cache_key,
        prompt=ChatPrompt(
            messages=messages,
            message_paths=("input",) * len(messages),
            effort_param="reasoning.effort",
            num_other_chars=text_size_of_calls(items),
            max_tokens=request.max_output_tokens,
            temperature=default(request.temperature, 1.0),
            top_p=top_p,
            top_k=top_k,
            min_p=request.min_p or 0.0,
            repetition_penalty=default(request.repetition_penalty, 1.0),
            stop=stop_strings(request.stop),
            seed=request.seed,
            logprobs=(request.top_logprobs or 0) if shows_logprobs(request) else None,
            form=output_form(request),
            reasoning_effort=request.reasoning.effort if request.reasoning else None,
            tools=tool_use(request, tools.functions),
        ),
    )


def output_form(request: ResponseRequest) -> OutputForm | None:
    match request.text and request.text.format:
        case JsonObjectFormat() as asked:
            form = of_json_object(asked, "text.format")
            check_size(form)
            return form
        case SchemaFormat(schema=schema):
            form = of_schema(schema, "text.format.schema")
            check_size(form)
            return form
    return None


def tool_use(request: ResponseRequest, by_name: Mapping[str, Tool]) -> ToolUse | None:
    """Return how the model may use the request's own tools; None: it is shown none. Raises
    BadField."""
    choice = request.tool_choice
    if isinstance(choice, McpChoice):
        choice.check(request.tools)
    if not by_name and only_mcp(request.tools):
        return None
    if not by_name:
        if choice not in (None, "none", "auto"):
            raise only_with_tools("tool_choice")
        return None
    if choice == "none":
        return None
    forced: tuple[str, ...] = ()
    match choice:
        case "required":
            forced = tuple(by_name)
        case FunctionChoice() | CustomChoice():
            forced = (known(choice.name, by_name, "tool_choice.name"),)
        case ResponseAllowedTools():
            names = (each.name for each in choice.tools)
            by_name = allowed(names, by_name, "tool_choice.tools[{}].name")
            forced = tuple(by_name) if choice.mode == "required" else ()
    is_one = isinstance(choice, FunctionChoice | CustomChoice)
    parallel = request.parallel_tool_calls is not False and not is_one
    return offered(by_name, forced, parallel=parallel)
